"""Know before it runs: bytes and seconds by formula, from config.json and the run file. No torch, no weights."""
