"""Print the packages of the extras named on the command line, a line each, as pip's -r reads them.

pip can install an extra only together with the project, which would build it once more.
"""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def packages(extra: str, project: dict[str, Any]) -> list[str]:
    """List the requirements of one extra, those of the extras it names included."""
    itself = project["name"] + "["
    found = []
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(itself):
            for inner in requirement.removeprefix(itself).removesuffix("]").split(","):
                found += packages(inner, project)
        else:
            found.append(requirement)
    return found


if __name__ == "__main__":
    pyproject = Path(__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    for name in sys.argv[1:]:
        print(*packages(name, project), sep="\n")
