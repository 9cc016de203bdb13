"""The store answers one question: bring me these bytes.

Callers name spans, layers or experts and never see whether they came from an object in a root, from an
original shard read in place, or over HTTP. The spine can also be laid out anew, in packs. The store
promises that bytes which contradict a known digest are never returned, that what it keeps appears whole
or not at all, and that offline means no socket. It knows nothing of arithmetic, tokens or sequences, and
never imports torch.
"""

from deltafin.store.arena import slot_nbytes
from deltafin.store.bulk import FetchPlan, Take, fetch, measure_rate, plan_fetch
from deltafin.store.check import RootStatus, Status, read_status, removable, remove
from deltafin.store.config import Limits, RootSpec, parse_nbytes, parse_root, read_config
from deltafin.store.drive import DEPTH, DEPTHS, DIRECT_FROM_NBYTES
from deltafin.store.driveprobe import DriveProbe, device_of, direct_reads, probe_drive
from deltafin.store.encodings import Bf12, Bf16, Encoding, Int8, PackFormat, Raw
from deltafin.store.evicting import evict_objects, plan_eviction
from deltafin.store.foreseen import foreseen_packs, piece_encoding
from deltafin.store.idle import BusyLine, Idle, lower_priority
from deltafin.store.iobench import file_system
from deltafin.store.lineprobe import probe_line
from deltafin.store.manifest import (
    ImportReport,
    Manifest,
    forget_proofs,
    import_manifest,
    make_manifest,
    read_manifest,
    write_manifest,
)
from deltafin.store.objectlog import ObjectLog
from deltafin.store.opening import asked_roots, default_cache, is_offline, open_catalog, open_store
from deltafin.store.packcheck import removable_packs, remove_packs
from deltafin.store.packing import PackPlan, PackTotals, plan_packs, write_packs
from deltafin.store.packs import Pack, PackPiece, PackSet, open_packs
from deltafin.store.placing import PlacePlan, apply_placement, plan_placement
from deltafin.store.proof import Prover, Verdict, settle, settle_all
from deltafin.store.repair import RepairPlan, RepairReport, mend_logs, plan_repair, rebuild_catalog, repair
from deltafin.store.selection import Item, all_items, expert_items, pair_items, parse_numbers, rest_items, spine_items
from deltafin.store.space import free_nbytes
from deltafin.store.spine import (
    HEAD,
    Block,
    LayerPieces,
    SpineLayer,
    SpineReader,
    SpineWalk,
    Uses,
    least_ring_nbytes,
    spine_pieces,
)
from deltafin.store.standin import Standin, make_standin, standin_packs
from deltafin.store.states import (
    StateFile,
    Weights,
    model_states,
    refuse_links,
    remove_states,
    state_files,
    state_folder,
    states_in,
    weights_of,
)
from deltafin.store.stats import SOURCES, StoreStats
from deltafin.store.store import Store
from deltafin.store.tuning import raw_rate, tune
from deltafin.store.verifying import VerifyReport, nbytes_to_verify, quick_verify, verify
from deltafin.store.verifystate import read_result, write_result

__all__ = [
    "DEPTH",
    "DEPTHS",
    "DIRECT_FROM_NBYTES",
    "HEAD",
    "SOURCES",
    "Bf12",
    "Bf16",
    "Block",
    "BusyLine",
    "DriveProbe",
    "Encoding",
    "FetchPlan",
    "Idle",
    "ImportReport",
    "Int8",
    "Item",
    "LayerPieces",
    "Limits",
    "Manifest",
    "ObjectLog",
    "Pack",
    "PackFormat",
    "PackPiece",
    "PackPlan",
    "PackSet",
    "PackTotals",
    "PlacePlan",
    "Prover",
    "Raw",
    "RepairPlan",
    "RepairReport",
    "RootSpec",
    "RootStatus",
    "SpineLayer",
    "SpineReader",
    "SpineWalk",
    "Standin",
    "StateFile",
    "Status",
    "Store",
    "StoreStats",
    "Take",
    "Uses",
    "Verdict",
    "VerifyReport",
    "Weights",
    "all_items",
    "apply_placement",
    "asked_roots",
    "default_cache",
    "device_of",
    "direct_reads",
    "evict_objects",
    "expert_items",
    "fetch",
    "file_system",
    "foreseen_packs",
    "forget_proofs",
    "free_nbytes",
    "import_manifest",
    "is_offline",
    "least_ring_nbytes",
    "lower_priority",
    "make_manifest",
    "make_standin",
    "measure_rate",
    "mend_logs",
    "model_states",
    "nbytes_to_verify",
    "open_catalog",
    "open_packs",
    "open_store",
    "pair_items",
    "parse_nbytes",
    "parse_numbers",
    "parse_root",
    "piece_encoding",
    "plan_eviction",
    "plan_fetch",
    "plan_packs",
    "plan_placement",
    "plan_repair",
    "probe_drive",
    "probe_line",
    "quick_verify",
    "raw_rate",
    "read_config",
    "read_manifest",
    "read_result",
    "read_status",
    "rebuild_catalog",
    "refuse_links",
    "removable",
    "removable_packs",
    "remove",
    "remove_packs",
    "remove_states",
    "repair",
    "rest_items",
    "settle",
    "settle_all",
    "slot_nbytes",
    "spine_items",
    "spine_pieces",
    "standin_packs",
    "state_files",
    "state_folder",
    "states_in",
    "tune",
    "verify",
    "weights_of",
    "write_manifest",
    "write_packs",
    "write_result",
]
