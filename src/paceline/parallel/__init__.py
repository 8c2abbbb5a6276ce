"""One model held by several workers between them: cut into stages, split over ranks, sharded; and its replicas."""
