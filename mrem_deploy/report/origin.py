"""What a run with `--data none` says about its texts, which the package made itself."""

from __future__ import annotations

from mrem_deploy.data.generated import DESCRIPTION

CALIBRATED = (
    "The calibration text was generated and has nothing of the task's subject: more may be lost than with "
    "data of the task."
)
MEASURED = (
    "The scores were measured on generated text, too: they say how alike the models are there, and nothing "
    "about text of your own."
)


def generated_notes(data: str | None) -> list[str]:
    """By the description of a run's data; none if all of it was given."""
    if data is None or not data.startswith(DESCRIPTION):
        return []
    return [CALIBRATED, MEASURED] if data == DESCRIPTION else [CALIBRATED]
