from .monitor import Monitor as Monitor
from .quantities import (MultiStepQuantity as MultiStepQuantity, SingleStepQuantity as SingleStepQuantity,
    quantity as quantity)
from .views import (BackwardInputExtension as BackwardInputExtension,
    BackwardOutputEigOfCovExtension as BackwardOutputEigOfCovExtension,
    BackwardOutputExtension as BackwardOutputExtension, Extension as Extension,
    ForwardInputEigOfCovExtension as ForwardInputEigOfCovExtension, ForwardInputExtension as ForwardInputExtension,
    ForwardOutputExtension as ForwardOutputExtension)
from .single_step import (InputCovMaxEig as InputCovMaxEig, InputCovStableRank as InputCovStableRank,
    InputCovCondition as InputCovCondition, InputCovCondition20 as InputCovCondition20,
    InputCovCondition50 as InputCovCondition50, InputCovCondition80 as InputCovCondition80,
    OutputGradCovMaxEig as OutputGradCovMaxEig, OutputGradCovStableRank as OutputGradCovStableRank,
    OutputGradCovCondition as OutputGradCovCondition, OutputGradCovCondition20 as OutputGradCovCondition20,
    OutputGradCovCondition50 as OutputGradCovCondition50, OutputGradCovCondition80 as OutputGradCovCondition80,
    WeightNorm as WeightNorm, WeightGradNorm as WeightGradNorm, InputMean as InputMean, InputStd as InputStd,
    InputSndNorm as InputSndNorm, OutputGradSndNorm as OutputGradSndNorm, RankMe as RankMe,
    WeightEffectiveRank as WeightEffectiveRank, LinearDeadNeuronNum as LinearDeadNeuronNum,
    SaturatedUnits as SaturatedUnits)
from .multi_step import (MeanTID as MeanTID, VarTID as VarTID, WeightParamJump as WeightParamJump,
    UpdateEffectiveRank as UpdateEffectiveRank, GradSNR as GradSNR, UnitActivity as UnitActivity)
