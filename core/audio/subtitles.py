"""A transcription as a file of subtitles."""

from .whisper import Transcription


def subtitles(result: Transcription, form: str) -> str:
    """Segments as SubRip (srt) or WebVTT (vtt)."""
    mark = "," if form == "srt" else "."

    def clock(seconds: float) -> str:
        whole, thousandths = divmod(round(seconds * 1000), 1000)
        return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{thousandths:03}"

    parts = [] if form == "srt" else ["WEBVTT\n\n"]
    for number, segment in enumerate(result.segments, 1):
        head = f"{number}\n" if form == "srt" else ""
        parts.append(f"{head}{clock(segment.start)} --> {clock(segment.end)}\n{segment.text.strip()}\n\n")
    return "".join(parts)
