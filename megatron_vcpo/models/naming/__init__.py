"""One table per model family: Hugging Face names <-> Megatron-Core GPTModel names, shapes and transformations.

- `ModelShape`: the sizes a table needs (layers, heads, vocabulary, experts).
- `Family`: a table of `Rule`s; `Family.parameters(shape)` expands it into concrete `ParameterSpec`s.
- `transform`: full Hugging Face tensors from Megatron's shards, and one shard from Hugging Face tensors.
- `megatron`: the parameters that one rank holds, by their names in the whole model.

Weight sync, checkpoint loading and the converters all read these tables. To add a family, add one `Family` to
`families.FAMILIES`, its new blocks to `blocks`, and one line to the round-trip tests.
"""

from megatron_vcpo.models.naming.families import FAMILIES, Family, family_by_name, family_for_architecture
from megatron_vcpo.models.naming.megatron import ParameterLayout, local_parameters, local_problems, unwrap
from megatron_vcpo.models.naming.rules import Kind, ParameterSpec, Rule
from megatron_vcpo.models.naming.shape import LatentSizes, ModelShape, ModelSizes, NamingError
from megatron_vcpo.models.naming.transform import export_tensors, import_shard, join_experts, shard_shape

__all__ = [
    "FAMILIES",
    "Family",
    "Kind",
    "LatentSizes",
    "ModelShape",
    "ModelSizes",
    "NamingError",
    "ParameterLayout",
    "ParameterSpec",
    "Rule",
    "export_tensors",
    "family_by_name",
    "family_for_architecture",
    "import_shard",
    "join_experts",
    "local_parameters",
    "local_problems",
    "shard_shape",
    "unwrap",
]
