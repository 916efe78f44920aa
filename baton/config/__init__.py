"""Settings of all processes. Each setting is a documented and validated field of a section.

A setting comes from, in rising order of precedence: the defaults here, one YAML file (`baton up --config FILE`), the
environment. `section.field` in YAML is `BATON_SECTION_FIELD` in the environment. These have a short form, too:

    BATON_GRPC_PORT   cluster.grpc_port        BATON_CACHE    cluster.cache_dir
    BATON_HTTP_PORT   cluster.http_port

`load` is the only code that reads the environment, except that client commands take BATON_ADDRESS for --address,
BATON_API_KEY for --api-key, and BATON_TLS, BATON_CA, BATON_CERTIFICATE and BATON_KEY for the options of those names.

engine      model, engine
pools       pools: what differs between the pools
transfer    transfer
serving     index, router and its SLO classes
cluster     cluster, kubernetes, autoscale
telemetry   telemetry
testing     the hidden section of our tests
secrets     hides the secrets among them
section     parses and validates fields, and words the errors
load        all sections together, from file and environment
origins     the value of each setting, and its source
"""

from baton.config.cluster import AutoscaleConfig, ClusterConfig, KubernetesConfig
from baton.config.engine import OWN_SETTINGS, EngineConfig, EveryEngineConfig, GibOrAuto, ModelConfig
from baton.config.load import REDIS_URL, SHORT_NAMES, Config, child_environment, load, process_config, read_file
from baton.config.origins import DEFAULT, SettingOrigin, origins
from baton.config.pools import POOL_SETTINGS, PoolConfig, PoolsConfig
from baton.config.secrets import HIDDEN, password_of, why_unreadable, with_password, without_password
from baton.config.section import MAX_TIMEOUT_S
from baton.config.serving import DEFAULT_CLASS, IndexConfig, RouterConfig, SloClassConfig
from baton.config.telemetry import TelemetryConfig
from baton.config.testing import Faults, TestingConfig, parse_faults
from baton.config.transfer import TransferConfig

__all__ = [
    "DEFAULT",
    "DEFAULT_CLASS",
    "HIDDEN",
    "MAX_TIMEOUT_S",
    "OWN_SETTINGS",
    "POOL_SETTINGS",
    "REDIS_URL",
    "SHORT_NAMES",
    "AutoscaleConfig",
    "ClusterConfig",
    "Config",
    "EngineConfig",
    "EveryEngineConfig",
    "Faults",
    "GibOrAuto",
    "IndexConfig",
    "KubernetesConfig",
    "ModelConfig",
    "PoolConfig",
    "PoolsConfig",
    "RouterConfig",
    "SettingOrigin",
    "SloClassConfig",
    "TelemetryConfig",
    "TestingConfig",
    "TransferConfig",
    "child_environment",
    "load",
    "origins",
    "parse_faults",
    "password_of",
    "process_config",
    "read_file",
    "why_unreadable",
    "with_password",
    "without_password",
]
