"""Which form the weights of a module have, and which quantizations a config.json may declare.

Only routed experts are quantised in this family. A config says that INT4 is to be expected; which
module has which form is decided by the tensors that exist (docs/checkpoints.md).
"""

from __future__ import annotations

from collections.abc import Callable, Container

from kdtree_engine.checkpoints.section import Section
from kdtree_engine.errors import CheckpointError

DENSE = "dense"
INT4 = "int4"

WEIGHT = ".weight"
PACKED = ".weight_packed"
SCALE = ".weight_scale"
SHAPE = ".weight_shape"


def find_quantization(*places: Section) -> Section | None:
    """The first `quantization_config` among `places` (top level, then text_config), or None."""
    for place in places:
        if "quantization_config" in place:
            return place.section("quantization_config")
    return None


def read_quantization(section: Section | None) -> str:
    """Return "none" or "int4". ConfigError for a method or variant that is not read."""
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
                raise weights.error(key, f"is {weights.data.get(key)!r:.60}; supported: {wanted!r}")
        weights.must_be("actorder")
        weights.must_be("dynamic", False)
    return "int4"


_INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
}

HANDLERS: dict[str, Callable[[Section], str]] = {"compressed-tensors": _read_compressed_tensors}
"""quant_method -> reader of the rest of the section; the seam for FP8."""


def module_form(module: str, stored: Container[str]) -> str:
    """DENSE or INT4 for `module`, by the names in `stored`. CheckpointError for both or neither."""
    dense, packed = module + WEIGHT in stored, module + PACKED in stored
    if dense and packed:
        raise CheckpointError(f"{module} is stored twice, as weight and as weight_packed")
    if not dense and not packed:
        raise CheckpointError(f"{module} has neither weight nor weight_packed")
    return INT4 if packed else DENSE
