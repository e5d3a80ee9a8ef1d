"""What runs in the rooms of the code sandbox. Imports the standard library only: a room sees nothing else of us."""
