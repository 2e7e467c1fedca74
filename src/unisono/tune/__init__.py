"""``unisono tune``: settings that change the speed of a run and nothing else, tried in pairs on this machine.

What is kept is what gained more than the noise explains, and ``tuned.yaml`` says so at its head. Refused: anything that
would change the model (the global batch, precision, what is trained), and settings that cannot act here, which are
named with the reason.
"""
