"""What `kvtools explore` shows of tables, as one page without a network and in a terminal."""
