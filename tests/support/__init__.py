"""Shared by several test folders: peers in this process or another, patterns, deadlines, leak checks."""
