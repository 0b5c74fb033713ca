"""Place of a fleet's versions and records, which can be away for some seconds."""

from __future__ import annotations

from pathlib import Path


class FolderPlace:
    """A link to a folder. While it is away the link leads to a file, so that nothing can be read or
    written through it, by no user."""

    def __init__(self, root: Path):
        self.link, self.there, self.away = root / "shared", root / "there", root / "away"
        self.there.mkdir()
        self.away.touch()
        self.come_back()

    def url(self, name: str) -> str:
        return str(self.link / name)

    def is_away(self) -> bool:
        return not self.link.is_dir()

    def leave(self) -> None:
        """Be away: every call fails from now on."""
        self._lead_to(self.away)

    def come_back(self) -> None:
        self._lead_to(self.there)

    def _lead_to(self, path: Path) -> None:
        new = self.link.with_name("shared.new")
        new.symlink_to(path)
        new.replace(self.link)
