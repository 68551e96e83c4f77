"""Print the packages of the extras named on the command line, a line each, as pip's -r reads them.

pip can install an extra only together with the project, which would build it once more.
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def packages(name: str, extras: dict[str, list[str]]) -> list[str]:
    """List the requirements of one extra, those of the extras it names included."""
    found = []
    for requirement in extras[name]:
        if requirement.startswith("torch_ort["):
            for inner in requirement.removeprefix("torch_ort[").removesuffix("]").split(","):
                found += packages(inner, extras)
        else:
            found.append(requirement)
    return found


if __name__ == "__main__":
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    for name in sys.argv[1:]:
        print(*packages(name, extras), sep="\n")
