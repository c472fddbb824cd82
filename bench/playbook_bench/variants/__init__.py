"""What a run is made of: a configuration of our trainer or a command, and the files of a commit."""
