"""Coverage-guided fuzzing; each script is a program of its own, since atheris ends the process it runs in."""
