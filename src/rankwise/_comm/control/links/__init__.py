"""The connections of a rank to others, which all groups share, and how they are made."""
