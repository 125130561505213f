"""Quantities of chosen modules, computed on a schedule"""
from typing import TYPE_CHECKING

from ..ground.lazy import lazy_attributes

if TYPE_CHECKING:
    from .monitor import Monitor as Monitor
    from .quantities import MultiStepQuantity as MultiStepQuantity
    from .quantities import SingleStepQuantity as SingleStepQuantity
    from .quantities import quantity as quantity
    from .views import BackwardInputExtension as BackwardInputExtension
    from .views import BackwardOutputEigOfCovExtension as BackwardOutputEigOfCovExtension
    from .views import BackwardOutputExtension as BackwardOutputExtension
    from .views import Extension as Extension
    from .views import ForwardInputEigOfCovExtension as ForwardInputEigOfCovExtension
    from .views import ForwardInputExtension as ForwardInputExtension
    from .views import ForwardOutputExtension as ForwardOutputExtension
    from .single_step import InputCovMaxEig as InputCovMaxEig
    from .single_step import InputCovStableRank as InputCovStableRank
    from .single_step import InputCovCondition as InputCovCondition
    from .single_step import InputCovCondition20 as InputCovCondition20
    from .single_step import InputCovCondition50 as InputCovCondition50
    from .single_step import InputCovCondition80 as InputCovCondition80
    from .single_step import OutputGradCovMaxEig as OutputGradCovMaxEig
    from .single_step import OutputGradCovStableRank as OutputGradCovStableRank
    from .single_step import OutputGradCovCondition as OutputGradCovCondition
    from .single_step import OutputGradCovCondition20 as OutputGradCovCondition20
    from .single_step import OutputGradCovCondition50 as OutputGradCovCondition50
    from .single_step import OutputGradCovCondition80 as OutputGradCovCondition80
    from .single_step import WeightNorm as WeightNorm
    from .single_step import WeightGradNorm as WeightGradNorm
    from .single_step import InputMean as InputMean
    from .single_step import InputStd as InputStd
    from .single_step import InputSndNorm as InputSndNorm
    from .single_step import OutputGradSndNorm as OutputGradSndNorm
    from .single_step import RankMe as RankMe
    from .single_step import WeightEffectiveRank as WeightEffectiveRank
    from .single_step import LinearDeadNeuronNum as LinearDeadNeuronNum
    from .single_step import SaturatedUnits as SaturatedUnits
    from .multi_step import MeanTID as MeanTID
    from .multi_step import VarTID as VarTID
    from .multi_step import WeightParamJump as WeightParamJump
    from .multi_step import UpdateEffectiveRank as UpdateEffectiveRank
    from .multi_step import GradSNR as GradSNR
    from .multi_step import UnitActivity as UnitActivity

__getattr__,__dir__ = lazy_attributes(__name__, {
    'monitor': 'Monitor',
    'quantities': 'MultiStepQuantity SingleStepQuantity quantity',
    'views': 'BackwardInputExtension BackwardOutputEigOfCovExtension BackwardOutputExtension Extension ForwardInputEigOfCovExtension '
        'ForwardInputExtension ForwardOutputExtension',
    'single_step': 'InputCovMaxEig InputCovStableRank InputCovCondition InputCovCondition20 InputCovCondition50 InputCovCondition80 '
        'OutputGradCovMaxEig OutputGradCovStableRank OutputGradCovCondition OutputGradCovCondition20 OutputGradCovCondition50 '
        'OutputGradCovCondition80 WeightNorm WeightGradNorm InputMean InputStd InputSndNorm OutputGradSndNorm RankMe '
        'WeightEffectiveRank LinearDeadNeuronNum SaturatedUnits',
    'multi_step': 'MeanTID VarTID WeightParamJump UpdateEffectiveRank GradSNR UnitActivity'})
