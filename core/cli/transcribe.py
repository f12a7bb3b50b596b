"""`headrace transcribe`: recordings in, text or subtitles out."""

import dataclasses
from typing import Any

import click

from .options import engine_config, engine_options_without, json_option
from .output import print_json, write_text
from .start import start_llm


@click.command()
@click.argument("model")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False))
@click.option("--language", help="Of the speech, a code such as de; without it, found by listening.")
@click.option("--translate", is_flag=True, help="Into English.")
@click.option("--prompt", default="", help="Text that might have come before: names and spellings.")
@click.option("--format", "form", type=click.Choice(["text", "srt", "vtt"]), default="text", show_default=True)
@engine_options_without("chat_template", "lora", "speculative", "seed")
@json_option
def command(
    model: str,
    files: tuple[str, ...],
    language: str | None,
    translate: bool,
    prompt: str,
    form: str,
    flags: dict[str, Any],
    as_json: bool,
) -> None:
    """Print the text of each recording FILE, by a Whisper model."""
    from ..audio.decode import read_audio
    from ..audio.subtitles import subtitles
    from ..audio.whisper import TranscriptionParams

    config = engine_config(flags, model=model)
    params = TranscriptionParams(
        language=language,
        task="translate" if translate else "transcribe",
        prompt=prompt,
        timestamps=True if as_json or form != "text" else None,
    )
    recordings = [read_audio(name) for name in files]  # before the model: what is wrong is told at once
    with start_llm(config) as llm:
        results = llm.transcribe(recordings, params)
        if as_json:
            entries = [{"file": name, **dataclasses.asdict(one)} for name, one in zip(files, results, strict=True)]
            print_json({"model": llm.built.model.name, "transcriptions": entries})
            return
        for one in results:
            write_text(f"{one.text}\n" if form == "text" else subtitles(one, form))
