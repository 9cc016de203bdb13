"""The indexer answers one question: where is every byte?

It reads the headers of all shards (from files or over HTTP), proves that the checkpoint is complete and
laid out as released, and writes the catalog, which is read-only afterwards. It promises that a catalog
never describes part of a checkpoint and never believes a number it has not checked. It knows nothing of
caches, digests of spans or arithmetic, and never imports torch.
"""

from deltafin.indexer.answers import Answer, Expected
from deltafin.indexer.blueprint import Blueprint, k3_config, k3_ignored
from deltafin.indexer.build import Progress, build_catalog, check_catalog, check_files
from deltafin.indexer.catalog import GLOBALS, Catalog, RowTable, Span, SpineGroup, Totals
from deltafin.indexer.config import LORA_NORM_EPS, ModelConfig, parse_config
from deltafin.indexer.hub import hub_files
from deltafin.indexer.layout import Place, Shard
from deltafin.indexer.mirrors import MirroredFiles, mirror_address
from deltafin.indexer.models import ModelRef, catalog_names, catalog_path, parse_model, source_of
from deltafin.indexer.publish import (
    clear_stale,
    discard,
    disk_error,
    is_alive,
    make_directory,
    publish,
    read_small,
    stale_files,
    sync_directory,
    temporary,
    this_host,
)
from deltafin.indexer.remote import RemoteFiles, RemoteStats, RetryPolicy
from deltafin.indexer.roles import EXPERT_PARTS, LAYER_PREFIX, ExpertPart, expert_layout
from deltafin.indexer.sketch import Plannable, Sketch
from deltafin.indexer.sources import K3_REPO, K3_REVISION, Location, Source

__all__ = [
    "EXPERT_PARTS",
    "GLOBALS",
    "K3_REPO",
    "K3_REVISION",
    "LAYER_PREFIX",
    "LORA_NORM_EPS",
    "Answer",
    "Blueprint",
    "Catalog",
    "Expected",
    "ExpertPart",
    "Location",
    "MirroredFiles",
    "ModelConfig",
    "ModelRef",
    "Place",
    "Plannable",
    "Progress",
    "RemoteFiles",
    "RemoteStats",
    "RetryPolicy",
    "RowTable",
    "Shard",
    "Sketch",
    "Source",
    "Span",
    "SpineGroup",
    "Totals",
    "build_catalog",
    "catalog_names",
    "catalog_path",
    "check_catalog",
    "check_files",
    "clear_stale",
    "discard",
    "disk_error",
    "expert_layout",
    "hub_files",
    "is_alive",
    "k3_config",
    "k3_ignored",
    "make_directory",
    "mirror_address",
    "parse_config",
    "parse_model",
    "publish",
    "read_small",
    "source_of",
    "stale_files",
    "sync_directory",
    "temporary",
    "this_host",
]
