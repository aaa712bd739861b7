"""The states of all transformations, as `init` returns them.

They are NamedTuples of arrays. `optax.tree.get(state, "mu")` finds a field without the type.
"""

from optax_largebatch.optimizers.lbsgd import ScaleByWarmedUpRateState
from optax_largebatch.transforms.adam import ScaleByAdamState, ScaleBySecondMomentState
from optax_largebatch.transforms.clamping import ClampParametersState
from optax_largebatch.transforms.decay import AddDecayedWeightsState, DecayToTargetRmsState
from optax_largebatch.transforms.hyperball import HyperballState
from optax_largebatch.transforms.learned_matrices import ScaleByLearnedMatricesState
from optax_largebatch.transforms.learning_rate import ScaleByLearningRateState
from optax_largebatch.transforms.median_clipping import ClipByMedianNormState
from optax_largebatch.transforms.momentum import AccumulateMomentumState
from optax_largebatch.transforms.nesterov import NesterovSplitState
from optax_largebatch.transforms.noise.noise_scale import MeasureNoiseScaleState
from optax_largebatch.transforms.orthogonalization.neurons import NormalizeNeuronsState
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    OrthogonalizeMomentumState,
)
from optax_largebatch.transforms.parameter_scale.factored_parameter_rms import (
    ScaleByFactoredParameterRmsState,
)
from optax_largebatch.transforms.parameter_scale.log_scale import LearnLogScaleState
from optax_largebatch.transforms.parameter_scale.parameter_rms import ScaleByParameterRmsState
from optax_largebatch.transforms.trust_ratio import ScaleByLarsState, ScaleByTrustRatioState
from optax_largebatch.wrappers.accumulation import AccumulateGradientsState
from optax_largebatch.wrappers.bad_steps import SkipBadStepsState
from optax_largebatch.wrappers.loss_scale import DynamicLossScaleState
from optax_largebatch.wrappers.master_weights import MasterWeightsState
from optax_largebatch.wrappers.stochastic_rounding import StochasticRoundingState
from optax_largebatch.wrappers.weight_average import AverageWeightsState

__all__ = [
    "AccumulateGradientsState", "AccumulateMomentumState", "AddDecayedWeightsState",
    "AverageWeightsState", "ClampParametersState", "ClipByMedianNormState",
    "DecayToTargetRmsState", "DynamicLossScaleState", "HyperballState", "LearnLogScaleState",
    "MasterWeightsState", "MeasureNoiseScaleState", "NesterovSplitState",
    "NormalizeNeuronsState", "OrthogonalizeMomentumState", "ScaleByAdamState",
    "ScaleByFactoredParameterRmsState", "ScaleByLarsState", "ScaleByLearnedMatricesState",
    "ScaleByLearningRateState", "ScaleByParameterRmsState", "ScaleBySecondMomentState",
    "ScaleByTrustRatioState", "ScaleByWarmedUpRateState", "SkipBadStepsState",
    "StochasticRoundingState",
]  # fmt: skip
