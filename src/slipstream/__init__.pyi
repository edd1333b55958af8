"""Every public name and where it comes from. ``__init__.py`` reads this file and imports lazily."""

from slipstream import codecs as codecs
from slipstream import compat as compat
from slipstream import consistency as consistency
from slipstream import methods as methods
from slipstream import outer_optimizers as outer_optimizers
from slipstream import routes as routes
from slipstream import schedules as schedules
from slipstream import systems as systems
from slipstream import testing as testing
from slipstream import topologies as topologies
from slipstream import updates as updates
from slipstream.errors import ConfigError as ConfigError
from slipstream.errors import RuntimeFault as RuntimeFault
from slipstream.errors import SlipstreamError as SlipstreamError
from slipstream.initialization import init as init
from slipstream.integrations import jax as jax
from slipstream.job import Job as Job
from slipstream.plan import Plan as Plan
from slipstream.runtime.figures.telemetry import Watcher as Watcher
from slipstream.strategy import Strategy as Strategy
from slipstream.systems import adam_factors as adam_factors
from slipstream.systems import ako as ako
from slipstream.systems import all_to_all as all_to_all
from slipstream.systems import allreduce as allreduce
from slipstream.systems import async_sgd as async_sgd
from slipstream.systems import backup_workers as backup_workers
from slipstream.systems import bounded_staleness as bounded_staleness
from slipstream.systems import diloco as diloco
from slipstream.systems import gadei as gadei
from slipstream.systems import k_async as k_async
from slipstream.systems import local_sgd as local_sgd
from slipstream.systems import low_rank as low_rank
from slipstream.systems import one_bit as one_bit
from slipstream.systems import parameter_flow as parameter_flow
from slipstream.systems import poseidon as poseidon
from slipstream.systems import push_pull as push_pull

__version__: str
