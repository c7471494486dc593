from enum import Enum

class CacheHitSource(Enum):
    P2P = ...
