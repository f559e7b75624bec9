"""What several test folders share: peers in this process or another, patterns, deadlines, leak checks."""
