"""The Blackwell backward in the reference design's own form: heads split over a pair of CTAs."""
