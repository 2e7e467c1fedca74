"""Is this machine fit? Each finding is measured or asked of the machine itself, and says what to do about it."""
