"""Dispatch of tokens to experts and combine of what they return, over whatever rail there is."""
