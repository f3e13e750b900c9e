"""Finds out what kind of file a policy is in, and reads it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from broker.contract import errors
from learner.quantize import scales
from learner.quantize.distil import distillation
from learner.study.user_models import recipe, subject
from learner.study.user_models.converter import converted, keras_model
from learner.study.user_models.formats import keras_chain, onnx_file, saved_model, sb3

_NORMALISER = "vecnormalize.pkl"


def read(
    path: Path,
    *,
    outputs: distillation.Outputs | None,
    low: NDArray[Any] | None,
    high: NDArray[Any] | None,
    normaliser: Path | None,
    verbose: bool,
) -> tuple[subject.Subject, str]:
    """Reads a policy: Stable-Baselines3 (.zip), ONNX, Keras or a SavedModel directory.

    Args:
        path: Its file, or directory.
        outputs: What it puts out, where the file does not tell; None takes values.
        low: Lower bounds of its actions [size], where the file does not tell.
        high: Upper bounds.
        normaliser: File of VecNormalize; None looks for one beside an agent's.
        verbose: Let the converter print what it likes.

    Returns:
        The policy, and one line on what was found or does not map; empty where there is nothing to say.

    Raises:
        PolicyError: It cannot be read; says what and where.
    """
    if not path.exists():
        raise errors.PolicyError(
            "there is no such model",
            reason="model",
            where=str(path),
            todo="name a .zip, .onnx or .keras file, or the directory of a SavedModel",
        )
    if path.suffix == ".zip" or (path.is_file() and _is_agent(path)):
        found = normaliser or beside(path)
        said = f"observations are normalised by {found}" if found else ""
        try:
            return recipe.ChainSubject(sb3.read(path, found, low=low, high=high)), said
        except scales.Unmapped as why:
            raise errors.PolicyError(
                f"the agent's network is no chain of dense layers and convolutions: {why}",
                reason="model",
                where=str(path),
                todo="export it to ONNX or build it in Keras",
            ) from why
    if normaliser is not None:
        raise errors.ConfigError("--normaliser is for agents of Stable-Baselines3", where=str(normaliser))
    kind = outputs or "values"
    if path.suffix == ".onnx":
        return recipe.ChainSubject(onnx_file.read(path, kind, low, high)), ""
    without = "by TFLiteConverter, without the fleet's recipe"
    if path.is_dir():
        graph = saved_model.load(path)
        try:
            return recipe.ChainSubject(saved_model.read(graph, kind, low, high)), ""
        except scales.Unmapped as why:
            return converted.GraphSubject(graph, kind, low, high, verbose=verbose), f"{without}: {why}"
    model = keras_model.load(path)
    try:
        return recipe.ChainSubject(keras_chain.read(model, kind, low, high)), ""
    except scales.Unmapped as why:
        return converted.KerasSubject(model, kind, low, high, verbose=verbose), f"{without}: {why}"


def beside(agent: Path) -> Path | None:
    """Returns the statistics of observations that were saved with an agent, where there are some.

    rl-baselines3-zoo keeps them in a directory that is called as the environment is.
    """
    nearby = [agent.with_name(_NORMALISER), *sorted(agent.parent.glob(f"*/{_NORMALISER}"))]
    return next((file for file in nearby if file.is_file()), None)


def _is_agent(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return {"data", "policy.pth"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False
