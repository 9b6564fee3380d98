"""The page of a server: drafted and plain answers side by side while they are written."""

from pathlib import Path

from markupsafe import Markup

from train.pages.page import render


def live_page(*, target: str, drafts: str, max_length: int, chat: bool = True) -> str:
    """target: its name; drafts: what drafts, in a few words; max_length: tokens of a prompt and its answer

    chat: whether prompts are a user's messages, not texts to continue
    """
    return render(
        "live.html.jinja",
        title="specdec",
        data={"target": target, "drafts": drafts, "max_length": max_length, "chat": chat},
        setting=f"{target}, drafted by {drafts}.",
        max_length=max_length,
        live_script=Markup((Path(__file__).parent / "live.js").read_text()),
    )
