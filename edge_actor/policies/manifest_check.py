"""Refuses policies before an interpreter sees a byte of them: too large, not for us, expired, damaged."""

from __future__ import annotations

import hashlib

from broker.contract import errors, messages, specs


def check_policy(
    manifest: messages.Manifest, model: bytes | memoryview, spec: specs.EnvSpec, now_s: float | None
) -> None:
    """Refuses a policy that must not reach an interpreter: by its manifest, and then by its bytes.

    Args:
        manifest: Signed by the learner.
        model: The bytes of the policy.
        spec: The environment here.
        now_s: Unix time; None on a board that cannot know it, where nothing expires.

    Raises:
        PolicyError: As `check_manifest`, and if the bytes are not those of the manifest.
    """
    check_manifest(manifest, len(model), spec, now_s)
    check_digest(manifest, model)


def check_manifest(manifest: messages.Manifest, model_bytes: int, spec: specs.EnvSpec, now_s: float | None) -> None:
    """Refuses a policy by what its manifest says, before its bytes are looked at.

    Args:
        manifest: Signed by the learner.
        model_bytes: Length of the model that came, or that a patch would give.
        spec: The environment here.
        now_s: As in `check_policy`.

    Raises:
        PolicyError: It is too large, of another length, made for another spec, or expired.
    """
    if max(manifest.length, model_bytes) > messages.MAX_POLICY_BYTES:
        raise errors.PolicyError(f"the policy has {model_bytes} bytes, more than any actor takes", reason="size")
    if manifest.length != model_bytes:
        raise errors.PolicyError(
            f"the policy has {model_bytes} bytes, its manifest says {manifest.length}", reason="length"
        )
    if manifest.fingerprint != spec.fingerprint:
        raise errors.PolicyError(
            f"the policy is for spec {manifest.fingerprint}, this environment {spec.fingerprint} ({spec.describe()})",
            reason="fingerprint",
        )
    if manifest.head not in spec.action.heads:
        raise errors.PolicyError(
            f"a head {manifest.head!r} cannot choose these actions",
            where=spec.describe(),
            reason="head",
            todo=f"publish one of {', '.join(spec.action.heads)}, or bring this actor to the learner's release",
        )
    check_expiry(manifest, now_s)


def check_digest(manifest: messages.Manifest, model: bytes | memoryview) -> None:
    """Refuses bytes that are not those of a manifest.

    Raises:
        PolicyError: They have another SHA-256.
    """
    if manifest.sha256 != hashlib.sha256(model).hexdigest():
        raise errors.PolicyError("the policy's bytes are not those of its manifest", reason="sha256")


def check_expiry(manifest: messages.Manifest, now_s: float | None) -> None:
    """Refuses a policy that has expired; `now_s` as in `check_policy`.

    Raises:
        PolicyError: It has expired.
    """
    if now_s is not None and 0.0 < manifest.expires_s < now_s:
        raise errors.PolicyError("the policy has expired", reason="expired")
