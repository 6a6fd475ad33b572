"""What proposes the draft trees: one protocol, several drafters."""
