"""What a command does once its flags are parsed, and how it talks to the terminal."""
