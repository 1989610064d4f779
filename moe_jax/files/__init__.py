"""Files: written whole or not at all, and read with limits when others may have written them."""
