"""What a checkpoint says about itself: a JSON document with every leaf's shape, dtype and checksum."""

import hashlib
import json
import pathlib
import re
from typing import Any


class Unusable(ValueError):
    """Why a checkpoint cannot be used; reads on after "checkpoint X ..."."""


def manifest(step: int, leaves: dict[str, Any], checksums: dict[str, int], meta: dict[str, Any]) -> dict[str, Any]:
    """{"digest", "body"} for JSON; the digest is that of the body.

    Raises:
        TypeError: where JSON cannot hold `meta`.
    """
    described = {
        name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": checksums[name]}
        for name, leaf in leaves.items()
    }
    body = {"step": step, "leaves": described, "meta": meta}
    return {"digest": _digest(body), "body": body}


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def opened(document: Any, step: int) -> dict[str, Any]:
    """The body of a manifest.

    Raises:
        Unusable: where it is not one, is damaged, or belongs to another step.
    """
    if not isinstance(document, dict) or set(document) != {"digest", "body"}:
        raise Unusable("was not written by this program")
    body = document["body"]
    if _digest(body) != document["digest"]:
        raise Unusable("is damaged: its manifest does not have the digest that it was saved with")
    if body["step"] != step:
        raise Unusable(f"was saved as step {body['step']}")
    return body


def unreadable(error: Exception, checkpoint: pathlib.Path, part: str) -> str:
    """What a user can do something with, of what Orbax raised when it read a part of a checkpoint: which file."""
    named = re.findall(re.escape(str(checkpoint)) + r"/([\w./-]*\w)", str(error))
    file = max([part, *named], key=len)  # TensorStore names the folder, then the file in it
    what = file if "/" in file else f"folder {file}"
    reason = of_the_system(error)
    return f"is damaged: its {what} cannot be read" + (f" ({reason})" if reason else "")


def of_the_system(error: Exception) -> str | None:
    """The system's own words for an error, such as "No space left on device", where it comes from there."""
    if isinstance(error, OSError):
        return error.strerror
    # TensorStore names files and operations first and the reason last.
    found = re.search(r"([^:]*) \[os_error_code", str(error))
    return found[1].strip() if found else None


def compare(saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises Unusable where the saved leaves and those to restore differ in path, shape or dtype."""
    for name in sorted(saved.keys() ^ wanted.keys()):
        raise Unusable(f"is of another model or optimizer: it {'also has' if name in saved else 'lacks'} {name}")
    for name, leaf in wanted.items():
        found = (tuple(saved[name]["shape"]), saved[name]["dtype"])
        expected = (tuple(leaf.shape), str(leaf.dtype))
        if found != expected:
            raise Unusable(
                f"is of another model or optimizer: {name} is {_named(*found)} there and {_named(*expected)} here"
            )


def _named(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def compare_checksums(saved: dict[str, Any], found: dict[str, int]) -> None:
    """Raises Unusable where the bits that were read are not those that were saved."""
    for name, value in found.items():
        if value != saved[name]["checksum"]:
            raise Unusable(f"is damaged: {name} does not have the checksum that it was saved with")
