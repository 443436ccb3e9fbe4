"""What a first run imports and works out, once for all processes that are forked from the server that imports this."""

from tqdm import tqdm

from flowalign.data import ASSETS
from flowalign.policies.diffusion import DiffusersPolicy

# its thread would hold a lock while others are forked
tqdm.monitor_interval = 0
DiffusersPolicy.from_pretrained(ASSETS / "tiny_sd3").add_lora(2, 2)
