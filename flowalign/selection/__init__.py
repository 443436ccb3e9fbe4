"""Which prompts an iteration trains on, and which of its groups are worth keeping; for pictures and texts alike."""

from flowalign.selection.base import Selection
from flowalign.selection.mopps import MoPPS
from flowalign.selection.replay import Replay, Stored
from flowalign.selection.sec import SEC
from flowalign.selection.shuffled import Shuffled
from flowalign.selection.together import Together

__all__ = ["SEC", "MoPPS", "Replay", "Selection", "Shuffled", "Stored", "Together"]
