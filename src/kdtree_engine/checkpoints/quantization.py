"""Which form the weights of a module have, and which quantizations a config.json may declare.

INT4 is for routed experts only, FP8 for every projection. A config says what is to be expected;
which module has which form is decided by the tensors that exist (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Callable, Container

from kdtree_engine.checkpoints.section import Section
from kdtree_engine.errors import CheckpointError, shown
from kdtree_engine.kernels.fp8 import BLOCK

DENSE = "dense"
INT4 = "int4"
FP8 = "fp8"

WEIGHT = ".weight"
PACKED = ".weight_packed"
SCALE = ".weight_scale"
SHAPE = ".weight_shape"
SCALE_INV = ".weight_scale_inv"


def find_quantization(*places: Section) -> Section | None:
    """The first `quantization_config` among `places` (top level, then text_config), or None."""
    for place in places:
        if "quantization_config" in place:
            return place.section("quantization_config")
    return None


def read_quantization(section: Section | None) -> str:
    """Return "none", "int4" or "fp8". ConfigError for a method or variant that is not read."""
    if section is None:
        return "none"
    method = section.text("quant_method")
    handler = HANDLERS.get(method)
    if handler is None:
        known = ", ".join(["no quantization", *HANDLERS])
        raise section.error("quant_method", f"is {method!r}; supported: {known}")
    return handler(section)


def _read_compressed_tensors(section: Section) -> str:
    """INT4 `pack-quantized`, symmetric, groups of 32, activations unquantised."""
    section.must_be("format", "pack-quantized", "mixed-precision")
    section.must_be("quantization_status", "compressed")
    if "kv_cache_scheme" in section:
        raise section.error("kv_cache_scheme", "is given; a quantised cache is not supported")
    groups = section.section("config_groups")
    if not groups.data:
        raise section.error("config_groups", "is empty")
    for name in groups.data:
        group = groups.section(name)
        group.must_be("format", "pack-quantized")
        for key in ("input_activations", "output_activations"):
            if key in group:
                raise group.error(key, "is given; quantised activations are not supported")
        weights = group.section("weights")
        for key, wanted in _INT4_WEIGHTS.items():
            if weights.data.get(key) != wanted:
                raise weights.error(
                    key, f"is {shown(weights.data.get(key))}; supported: {wanted!r}"
                )
        weights.must_be("actorder")
        weights.must_be("dynamic", False)
    return INT4


def _read_fp8(section: Section) -> str:
    """e4m3 in blocks of 128 by 128 with float scales; activations quantised on the fly, or not.

    "dynamic" asks nothing of a checkpoint: the engine leaves activations as they are.
    """
    section.must_be("fmt", "e4m3")
    section.must_be("activation_scheme", "dynamic")
    section.must_be("scale_fmt", "float")
    section.must_be("expert_dtype", "fp8")
    if "kv_cache_scheme" in section:
        raise section.error("kv_cache_scheme", "is given; a quantised cache is not supported")
    block = section.data.get("weight_block_size")
    if block != [BLOCK, BLOCK]:
        raise section.error(
            "weight_block_size", f"is {shown(block)}; supported: [{BLOCK}, {BLOCK}]"
        )
    return FP8


_INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}

HANDLERS: dict[str, Callable[[Section], str]] = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
}
"""quant_method -> reader of the rest of the section."""


def module_form(module: str, stored: Container[str]) -> str:
    """DENSE, INT4 or FP8 for `module`, by the names in `stored`.

    CheckpointError for two forms at once, or none.
    """
    weight, packed, blocks = (module + part in stored for part in (WEIGHT, PACKED, SCALE_INV))
    if packed and (weight or blocks):
        other = "weight" if weight else "weight_scale_inv"
        raise CheckpointError(f"{module} is stored twice, as {other} and as weight_packed")
    if blocks and not weight:
        raise CheckpointError(f"{module} has weight_scale_inv, but no weight")
    if not weight and not packed:
        raise CheckpointError(f"{module} has neither weight nor weight_packed")
    if packed:
        return INT4
    return FP8 if blocks else DENSE
