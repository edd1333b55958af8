"""Combinations of parts that make no sense: the rules that ``slipstream.compat`` checks.

Every part states facts about itself (``Part.facts``). A rule names facts that do not go together,
the reason, and what to do instead.
"""

from __future__ import annotations

from slipstream.parts import Incompatibility, facts

SERVERS_UPDATE = "let servers update and send weights: Update(outer=UserOptimizer(at='server'))"

RULES = (
    # ---- A worker may miss results.
    Incompatibility(
        facts("rounds of the first N", "workers update"),
        "a late worker misses results; where workers update, results are increments, of which "
        "none may be missed",
        SERVERS_UPDATE,
    ),
    Incompatibility(
        facts("each gradient is an update", "workers update", "servers hold"),
        "a worker gets the results of its own gradients only; where workers update, it would miss "
        "the other workers' increments",
        SERVERS_UPDATE,
    ),
    Incompatibility(
        facts("every K gradients are an update", "workers update"),
        "a worker gets only the results to which it contributed; where workers update, it would "
        "miss the increments of all others",
        SERVERS_UPDATE,
    ),
    Incompatibility(
        facts("workers relay"),
        "a tree sends results to all workers, but these are only for the workers whose gradients "
        "they contain",
        "use Sharded()",
        any_of=facts(
            "rounds of the first N",
            "each gradient is an update",
            "every K gradients are an update",
        ),
    ),
    Incompatibility(
        facts("rounds of the first N", "may run ahead"),
        "a round of the first N does not wait for slow workers, so there is nothing to run ahead "
        "of",
        "use Lag(0), or StaleSynchronous()",
    ),
    Incompatibility(
        facts("each gradient is an update", "may run ahead"),
        "a worker continues when its own gradient is applied, so there is nothing to run ahead of",
        "use Lag(0)",
    ),
    Incompatibility(
        facts("every K gradients are an update", "may run ahead"),
        "a worker continues when an update contains its gradient, so there is nothing to run ahead "
        "of",
        "use Lag(0), or StaleSynchronous()",
    ),
    # ---- Every worker holds every tensor.
    Incompatibility(
        facts("the holder updates", "every worker holds"),
        "every worker holds the tensor: there is no server to update weights",
        "use UserOptimizer(at='worker'), or Sharded()",
    ),
    Incompatibility(
        facts("every worker holds", "each gradient is an update"),
        "workers would apply gradients in different orders, and their weights would drift apart",
        "use Sharded(), or All()",
    ),
    Incompatibility(
        facts("every worker holds", "rounds of the first N"),
        "no server decides for all workers which gradients make a round",
        "use Sharded()",
    ),
    Incompatibility(
        facts("every worker holds", "every K gradients are an update"),
        "no server decides for all workers which K gradients make an update",
        "use Sharded()",
    ),
    Incompatibility(
        facts("every worker holds", "stale-synchronous rounds"),
        "workers would count different gradients in a round, and their weights would drift apart",
        "use All() with the same Lag(), or Sharded()",
    ),
    Incompatibility(
        facts("every worker holds", "survives lost workers"),
        "workers may have received different parts of what a lost worker sent",
        "use Sharded()",
    ),
    Incompatibility(
        facts("every worker holds", "over links", "down: lossy"),
        "every worker computes the result for itself, so nothing is sent back",
        "use down=Dense()",
    ),
    # ---- Every worker holds a share of the chunks.
    Incompatibility(
        facts("workers hold shares", "the holder updates"),
        "a worker that holds a share of the chunks has no optimizer for it",
        "use UserOptimizer(at='worker'), or Sharded()",
    ),
    Incompatibility(
        facts("workers hold shares"),
        "workers that hold shares count the gradients of all workers in every round",
        "use Consistency(All()), or Sharded()",
        unless=facts("rounds of all workers"),
    ),
    Incompatibility(
        facts("workers hold shares", "survives lost workers"),
        "the share of the chunks that a lost worker held is lost with it",
        "use All(), or Sharded()",
    ),
    # ---- Two levels: the workers of a host aggregate first.
    Incompatibility(
        facts("hosts aggregate first", "some tensors skip the host"),
        "one worker of a host exchanges for all of them, so all tensors have two levels or none",
        "use TwoLevel() for every route",
    ),
    Incompatibility(
        facts("hosts aggregate first"),
        "a host's workers make a round together, and contribute their sum",
        "use Consistency(All()) or FirstOf(), or one level: between= of TwoLevel()",
        any_of=facts(
            "stale-synchronous rounds",
            "each gradient is an update",
            "every K gradients are an update",
        ),
    ),
    Incompatibility(
        facts("hosts aggregate first"),
        "a host's workers share one result, which all of them need before the next round, and none "
        "of them may be missing",
        "use Consistency(All(), Lag(0)), or one level: between= of TwoLevel()",
        any_of=facts("may run ahead", "survives lost workers"),
    ),
    Incompatibility(
        facts("hosts aggregate first", "update deltas are sent"),
        "update deltas are applied in the order in which messages bring them, and only one worker "
        "of a host gets these",
        "use Update(inner=Gradients()), or one level: between= of TwoLevel()",
    ),
    Incompatibility(
        facts("hosts aggregate first", "keeps own weights in part", "up: error feedback"),
        "what waits for the next round is the host's, and its workers cannot take it out of the "
        "weights that each of them keeps",
        "use mix=0 (where steps overlap it is 0.5 by default), or up=Dense() (wire='same'), or one "
        "level: hierarchical=False, or the topology that is between= of TwoLevel()",
    ),
    # ---- Collectives.
    Incompatibility(
        facts("over a collective"),
        "a collective leaves the result with every worker, which is a mesh",
        "use Mesh(), or over=Links()",
        unless=facts("every worker holds"),
    ),
    Incompatibility(
        facts("over a collective"),
        "a collective sums dense values",
        "use up=Dense() and down=Dense(), or over=Links()",
        any_of=facts(
            "up: error feedback", "up: compact form", "down: error feedback", "up: no mean"
        ),
    ),
    Incompatibility(
        facts("over a collective"),
        "a collective needs every worker in every round",
        "use Consistency(All()), or over=Links()",
        unless=facts("rounds of all workers"),
    ),
    Incompatibility(
        facts("over a collective", "may run ahead"),
        "a collective ends when every worker has joined it, so no worker can run ahead",
        "use Lag(0), or over=Links()",
    ),
    Incompatibility(
        facts("over a collective", "update deltas are sent"),
        "update deltas are applied in the order in which messages bring them, and a collective "
        "sends no messages",
        "use Update(inner=Gradients()), or over=Links()",
    ),
    Incompatibility(
        facts("over a collective", "survives lost workers"),
        "a collective cannot continue without a lost worker",
        "use All(), or over=Links() with Sharded()",
    ),
    # ---- Factors and rows of whole layers.
    Incompatibility(
        facts("up: compact form"),
        "a layer's gradient is computed from all of its factors or rows, which must be in one "
        "place",
        "use Sharded(whole_layers=True), or Mesh()",
        unless=facts("layers stay whole"),
    ),
    Incompatibility(
        facts("up: compact form"),
        "factors and rows are forms of a gradient, not of an update delta or an outer gradient",
        "use Update(inner=Gradients()), or up=Dense()",
        any_of=facts("update deltas are sent", "outer gradients are sent"),
    ),
    Incompatibility(
        facts("up: compact form", "clips"),
        "a gradient's norm is not known while it is sent as factors or rows",
        "use up=Dense()",
    ),
    Incompatibility(
        facts("chosen in the run"),
        "Cheapest() needs all workers to choose the same route for a layer in every round",
        "use Consistency(All(), Lag(0)), or Prefer() instead of Cheapest()",
        unless=facts("rounds of all workers"),
    ),
    Incompatibility(
        facts("chosen in the run"),
        "Cheapest() needs all workers to choose the same route for a layer in every round",
        "use Consistency(All(), Lag(0)), or Prefer() instead of Cheapest()",
        any_of=facts("may run ahead", "survives lost workers"),
    ),
    Incompatibility(
        facts("chosen in the run", "the holder updates"),
        "gradients sent as factors or rows do not reach the server that updates the layer when its "
        "gradient is dense",
        "use UserOptimizer(at='worker'), or Prefer() with Sharded(whole_layers=True)",
    ),
    Incompatibility(
        facts("chosen in the run", "up: compact form"),
        "with Cheapest() factors and rows go from worker to worker, and servers get dense "
        "gradients only",
        "use Mesh() for factors and rows, or Prefer() instead of Cheapest()",
        unless=facts("every worker holds"),
    ),
    # ---- Codecs whose frames can be decoded only in the basis that all workers agree on.
    Incompatibility(
        facts("up: agreed basis"),
        "all workers must use the same basis in a round, but here a round has gradients of "
        "several clocks, or of one worker",
        "use All() or FirstOf(), or up=Quantized()",
        any_of=facts(
            "stale-synchronous rounds",
            "each gradient is an update",
            "every K gradients are an update",
        ),
    ),
    Incompatibility(
        facts("down: agreed basis"),
        "a result returns in the basis in which workers sent their gradients",
        "give up= and down= the same LowRank(), or use down=Dense()",
        unless=facts("down: as up"),
    ),
    # ---- The way down.
    Incompatibility(
        facts("down: lossy", "the holder updates"),
        "weights that are rounded on the way down stay rounded, and the errors add up",
        "use down=Dense()",
    ),
    # ---- What is sent, and who applies it.
    Incompatibility(
        facts("leaves during backward"),
        "update deltas and outer gradients are known only after the optimizer's step",
        "use AfterBackward()",
        any_of=facts("update deltas are sent", "outer gradients are sent"),
    ),
    Incompatibility(
        facts("update deltas are sent", "the holder updates"),
        "update deltas are added where the optimizer has run, which is at the workers",
        "use outer=Add(at='worker')",
    ),
    Incompatibility(
        facts("update deltas are sent", "the optimizer applies the result"),
        "an update delta comes from an optimizer, so it is added, not used for another step",
        "use outer=Add(at='worker')",
    ),
    Incompatibility(
        facts("gradients are sent", "adds the result"),
        "a gradient that is added to the weights would have no learning rate",
        "use outer=UserOptimizer(), or inner=UserSteps()",
    ),
    Incompatibility(
        facts("update deltas are sent", "up: no mean"),
        "an update delta is added to the weights as it is, and this codec's results are no means",
        "use inner=Gradients(), or a codec whose results are means",
    ),
    Incompatibility(
        facts("outer gradients are sent", "up: no mean"),
        "job.flush and the end of a job give all workers the mean of their weights, and this "
        "codec's results are no means",
        "use inner=Gradients(), or a codec whose results are means",
    ),
    # ---- Local steps and an outer optimizer (DiLoCo).
    Incompatibility(
        facts("outer gradients are sent"),
        "an outer gradient is the distance that a worker has moved, which is no gradient of the "
        "loss",
        "use outer=Nesterov(), or inner=Gradients()",
        unless=facts("an outer optimizer applies the result"),
    ),
    Incompatibility(
        facts("an outer optimizer applies the result"),
        "an outer optimizer applies outer gradients, which workers have after steps of their own",
        "use inner=LocalSteps(), or outer=UserOptimizer()",
        unless=facts("outer gradients are sent"),
    ),
    Incompatibility(
        facts("outer gradients are sent"),
        "outer gradients of one round start from the same outer weights, and Asynchronous(), "
        "KAsync() and StaleSynchronous() would mix those of several",
        "use Consistency(All()) or Consistency(FirstOf(n))",
        any_of=facts(
            "each gradient is an update",
            "every K gradients are an update",
            "stale-synchronous rounds",
        ),
    ),
    Incompatibility(
        facts("outer gradients are sent", "may run ahead"),
        "how far workers run ahead of an outer round is a matter of LocalSteps()",
        "use Lag(0), and overlap_steps=",
    ),
    Incompatibility(
        facts("outer gradients are sent", "rounds of the first N"),
        "which workers make a round is decided for the whole model, and a late worker continues "
        "from the new outer weights",
        "use LocalSteps() without fragments=, overlap_steps= and mix=, or All()",
        any_of=facts("in fragments", "merged later", "keeps own weights in part"),
    ),
    Incompatibility(
        facts("keeps own weights in part", "down: error feedback"),
        "what waits at the holder for its next result is in the weights that a worker keeps, and "
        "would count twice, until a later round takes it back",
        "use down=Dense() or Quantized(), or mix=0",
        unless=facts("down: each value rounded"),
    ),
    Incompatibility(
        facts("outer gradients are sent", "averages"),
        "outer weights are averages already: of workers, and over steps by the momentum",
        "leave out averaged=, and evaluate within job.outer_weights()",
    ),
    Incompatibility(
        facts("outer gradients are sent", "damped"),
        "no outer gradient is stale",
        "leave the damping out, and set lr= of the outer optimizer instead",
    ),
    Incompatibility(
        facts("outer gradients are sent", "survives lost workers"),
        "a worker's own weights are lost with it",
        "use All(), or FirstOf() with Nesterov(at='server')",
    ),
    Incompatibility(
        facts("damped by age", "workers update"),
        "only the holder of the weights knows how old a gradient is",
        "use Constant(), or UserOptimizer(at='server')",
    ),
    Incompatibility(
        facts("damped by age", "every K gradients are an update"),
        "an update has one learning rate, and its K gradients have different ages",
        "use Constant(), or Asynchronous(), where every gradient is an update",
    ),
    Incompatibility(
        facts("damped", "rounds of all workers", "workers update"),
        "in rounds of all workers no gradient is stale",
        "leave the damping out, and set the learning rate instead",
        unless=facts("may run ahead", "update deltas are sent"),
    ),
    Incompatibility(
        facts("ramps up"),
        "only a server counts updates, and knows when a worker may begin",
        "leave ramp_up= out, or use Sharded()",
        unless=facts("servers hold"),
    ),
    Incompatibility(
        facts("clips", "leaves during backward"),
        "the norm of the whole gradient is known only after backward",
        "use AfterBackward(), which is overlap=False",
    ),
)
