"""Compute quantities of chosen modules on a schedule"""
from ..ground.lazy import lazy_attributes

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
