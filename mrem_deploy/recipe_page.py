"""`python -m mrem_deploy.recipe_page`: the text of docs/recipe.md, made from the recipe's options."""

from __future__ import annotations

import dataclasses

from mrem_deploy.base.options import flag, markdown
from mrem_deploy.recipe import Recipe
from mrem_deploy.recipe_groups import GROUPS

PAGE = """\
# The recipe: every option of `mrem quantize`

Every option is also a key of a YAML file, with `_` or `-` between its words:

```yaml
# recipe.yaml
model: my-bert-sst2
task: sst2
data: glue/SST-2
out: result
bits: 4-4-8
```

`mrem quantize --config recipe.yaml` runs it. Options on the command line override the file.
Every result folder holds the recipe that made it, with all defaults filled in. An unknown key is an error.

A switch such as `--per-channel` is turned off again by `--no-per-channel`, in YAML by `false`.
The same command continues an interrupted run; `--fresh` starts over ([tour.md](tour.md#interruptions)).
To continue, all options must be the same, except
{free}.

This page is generated from `mrem_deploy/recipe.py`; `make docs` writes it again.
"""


def page() -> str:
    """docs/recipe.md."""
    free = [
        f"`{flag(item.name)}`"
        for item in dataclasses.fields(Recipe)
        if not item.metadata["decides"] and item.name != "out"  # checkpoints are next to --out
    ]
    return (
        PAGE.format(free=", ".join(free[:-1]) + f" and {free[-1]}")
        + "\n".join(markdown(Recipe, GROUPS))
        + "\n"
    )


if __name__ == "__main__":
    print(page(), end="")
