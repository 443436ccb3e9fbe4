"""Each algorithm is one short file that reads like the method section of its paper."""
