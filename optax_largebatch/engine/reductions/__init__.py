"""How sums over blocks are taken on each platform."""
