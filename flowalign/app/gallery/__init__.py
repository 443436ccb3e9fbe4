"""The gallery: a page, opened from disk or served, where people see how alignment changed samples, and vote."""

from flowalign.app.gallery.build import build
from flowalign.runs.previews import Film, Group, Limits, save_previews
from flowalign.runs.samples import save_samples

__all__ = ["Film", "Group", "Limits", "build", "save_previews", "save_samples"]
