"""Rotary embeddings of a config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from kdtree_engine.checkpoints.section import Section
from kdtree_engine.config import RopeConfig

KINDS = ("default", "yarn")


def read_rope(section: Section) -> RopeConfig:
    """The RopeConfig of a network. ConfigError for a missing key or another kind of scaling.

    transformers 5 writes `rope_parameters` {rope_type, rope_theta, ..}, older files `rope_theta`
    and `rope_scaling` {type or rope_type, ..} (null for plain RoPE); theta may stand in either.
    Kind "default" means no YaRN, whatever other keys the object has.
    """
    inner = section
    for key in ("rope_parameters", "rope_scaling"):
        if key in section:
            inner = section.section(key)
            break
    theta_home = inner if "rope_theta" in inner else section
    theta = theta_home.number("rope_theta")
    if theta <= 1.0:
        raise theta_home.error("rope_theta", f"is {theta:g}, expected a number over 1")
    if inner is section:
        return RopeConfig(theta=theta)
    key = "rope_type" if "rope_type" in inner else "type"
    kind = inner.text(key)
    if kind not in KINDS:
        raise inner.error(key, f"is {kind!r}; supported: {', '.join(KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    inner.must_be("truncate", True)
    for key in ("factor", "beta_fast", "beta_slow"):
        if not 1e-3 <= inner.number(key, 1.0) <= 1e6:
            raise inner.error(key, f"is {inner.number(key):g}, expected 0.001 to 1,000,000")
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=inner.number("factor"),
        original_max_positions=inner.size("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        mscale=inner.number("mscale", 1.0, positive=False),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0, positive=False),
        attention_factor=inner.number("attention_factor") if "attention_factor" in inner else None,
    )
