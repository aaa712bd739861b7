"""Large-batch training in JAX: layer-wise adaptive optimizers as chains of small links."""

import sys
from typing import TYPE_CHECKING, Any

from optax_largebatch import recipes, states
from optax_largebatch.diagnostics import plots
from optax_largebatch.diagnostics.averaged_params import averaged_params
from optax_largebatch.diagnostics.critical_batch_size import (
    CriticalBatchSize,
    fit_critical_batch_size,
    within_critical_batch_size,
)
from optax_largebatch.diagnostics.diagnose import diagnose
from optax_largebatch.diagnostics.explain import Explanation, explain
from optax_largebatch.diagnostics.gradient_reduction import check_gradient_reduction
from optax_largebatch.diagnostics.matrix_groups import matrix_groups
from optax_largebatch.diagnostics.measure_critical_batch_size import (
    MeasuredCriticalBatchSize,
    measure_critical_batch_size,
)
from optax_largebatch.diagnostics.noise_scale import NoiseScale, layer_noise_scales, noise_scale
from optax_largebatch.diagnostics.optimizer_facts import trust_ratios
from optax_largebatch.diagnostics.step_metrics import step_metrics
from optax_largebatch.migration.adopt_state import adopt_state
from optax_largebatch.optimizers.adamh import adamh
from optax_largebatch.optimizers.cain import cain
from optax_largebatch.optimizers.eve import eve
from optax_largebatch.optimizers.lamb import lamb
from optax_largebatch.optimizers.lans import lans
from optax_largebatch.optimizers.lars import larc, lars
from optax_largebatch.optimizers.lbsgd import lbsgd
from optax_largebatch.optimizers.learned_gradient import learned_gradient
from optax_largebatch.optimizers.muon import muon
from optax_largebatch.optimizers.muonh import muonh
from optax_largebatch.optimizers.scaled_adam import scaled_adam
from optax_largebatch.params.groups import ParamGroups, param_groups
from optax_largebatch.params.rules import Rule, at_least_ndim, matching, matching_kinds
from optax_largebatch.params.stacked import Stacked, stacked_layers
from optax_largebatch.plans.batch_plan import batch_plan
from optax_largebatch.plans.growth import Growth, seesaw
from optax_largebatch.plans.law import scale_batch_size
from optax_largebatch.plans.plan import BatchPlan
from optax_largebatch.plans.planned_rate import PlannedRate
from optax_largebatch.plans.stages import Stage
from optax_largebatch.plans.tuned_run import TunedRun
from optax_largebatch.recipes.planned_optimizer import planned_optimizer
from optax_largebatch.schedules.eden import eden, eden2, values_schedule
from optax_largebatch.schedules.warmup import (
    large_batch_warmup,
    warmup_decay,
    warmup_drops,
    warmup_inverse_sqrt,
)
from optax_largebatch.sharding import optimizer_state_shardings
from optax_largebatch.transforms.adam import scale_by_adam, scale_by_second_moment
from optax_largebatch.transforms.block_normalization import normalize_by_block_norm
from optax_largebatch.transforms.centralization import centralize_gradients
from optax_largebatch.transforms.chain import chain, sum_of
from optax_largebatch.transforms.clamping import clamp_parameters
from optax_largebatch.transforms.clipping import clip_by_global_norm, clip_by_value
from optax_largebatch.transforms.decay import add_decayed_weights, decay_to_target_rms
from optax_largebatch.transforms.hyperball import hyperball
from optax_largebatch.transforms.learning_rate import scale_by_learning_rate
from optax_largebatch.transforms.median_clipping import clip_by_median_norm
from optax_largebatch.transforms.momentum import accumulate_momentum
from optax_largebatch.transforms.nesterov import nesterov_split
from optax_largebatch.transforms.noise.noise_scale import measure_noise_scale
from optax_largebatch.transforms.noise.small_batches import (
    SmallBatches,
    small_batches_of_devices,
    small_batches_of_examples,
)
from optax_largebatch.transforms.orthogonalization.matrix_scale import scale_by_matrix_shape
from optax_largebatch.transforms.orthogonalization.neurons import normalize_neurons
from optax_largebatch.transforms.orthogonalization.orthogonalized_momentum import (
    orthogonalize_momentum,
)
from optax_largebatch.transforms.parameter_scale.factored_parameter_rms import (
    scale_by_factored_parameter_rms,
)
from optax_largebatch.transforms.parameter_scale.log_scale import learn_log_scale
from optax_largebatch.transforms.parameter_scale.parameter_rms import scale_by_parameter_rms
from optax_largebatch.transforms.trust_ratio import scale_by_lars, scale_by_trust_ratio
from optax_largebatch.unknown_names import says_unknown
from optax_largebatch.wrappers.accumulation import accumulate_gradients, has_updated
from optax_largebatch.wrappers.bad_steps import skip_bad_steps
from optax_largebatch.wrappers.loss_scale import dynamic_loss_scale
from optax_largebatch.wrappers.master_weights import master_weights
from optax_largebatch.wrappers.partition_specs import with_partition_specs
from optax_largebatch.wrappers.stochastic_rounding import stochastic_rounding
from optax_largebatch.wrappers.weight_average import average_weights

__version__ = "0.2.0"

if not TYPE_CHECKING:  # with it, a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        raise AttributeError(says_unknown(name), name=name, obj=sys.modules[__name__])


__all__ = [
    "BatchPlan", "CriticalBatchSize", "Explanation", "Growth", "MeasuredCriticalBatchSize",
    "NoiseScale", "ParamGroups", "PlannedRate", "Rule", "SmallBatches", "Stacked", "Stage",
    "TunedRun", "accumulate_gradients", "accumulate_momentum", "adamh", "add_decayed_weights",
    "adopt_state", "at_least_ndim", "average_weights", "averaged_params", "batch_plan", "cain",
    "centralize_gradients", "chain", "check_gradient_reduction", "clamp_parameters",
    "clip_by_global_norm", "clip_by_median_norm", "clip_by_value", "decay_to_target_rms",
    "diagnose", "dynamic_loss_scale", "eden", "eden2", "eve", "explain",
    "fit_critical_batch_size", "has_updated", "hyperball", "lamb", "lans", "larc",
    "large_batch_warmup", "lars", "layer_noise_scales", "lbsgd", "learn_log_scale",
    "learned_gradient", "master_weights", "matching", "matching_kinds", "matrix_groups",
    "measure_critical_batch_size", "measure_noise_scale", "muon", "muonh", "nesterov_split",
    "noise_scale", "normalize_by_block_norm", "normalize_neurons", "optimizer_state_shardings",
    "orthogonalize_momentum", "param_groups", "planned_optimizer", "plots", "recipes",
    "scale_batch_size", "scale_by_adam", "scale_by_factored_parameter_rms", "scale_by_lars",
    "scale_by_learning_rate", "scale_by_matrix_shape", "scale_by_parameter_rms",
    "scale_by_second_moment", "scale_by_trust_ratio", "scaled_adam", "seesaw", "skip_bad_steps",
    "small_batches_of_devices", "small_batches_of_examples", "stacked_layers", "states",
    "step_metrics", "stochastic_rounding", "sum_of", "trust_ratios", "values_schedule",
    "warmup_decay", "warmup_drops", "warmup_inverse_sqrt", "with_partition_specs",
    "within_critical_batch_size",
]  # fmt: skip
