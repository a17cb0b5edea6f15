//! What pipelines run on in a simulation: a task for each stage instead of a device thread, a model of links instead of
//! sockets, and a cost model instead of arithmetic that takes its time.

mod links;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::{Either, select};
use shoal_actors::env::{BoxFuture, Compute, Env};
use shoal_actors::ids::NodeId;
use shoal_actors::stage::machine::StageMachine;
use shoal_actors::stage::message::Tokens;
use shoal_actors::stage::pipes::{Door, OpenPort, Pipes, Place, RunningStage, StageEvent, StageJob, Ticket};
use shoal_actors::stage::port::{Port, PortCloser, PortError, PortEvents, PortPlan, PortSender};
use shoal_actors::stage::{LinkStage, StageKey};
use tokio::sync::Notify;

use crate::broken::Broken;
use crate::compute::SimCompute;
use crate::world::World;
use links::Receiver;
pub use links::SimLinks;

/// What a disk gives in a second, in bytes.
const DISK_BYTES_PER_SECOND: f64 = 2e9;

/// A stage that is in memory, whatever its node says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedStage {
    /// Its layers.
    pub layers: Range<u32>,
    /// Memory of its weights and of its keys and values, in bytes.
    pub bytes: u64,
}

type Loaded = Arc<Mutex<BTreeMap<StageKey, LoadedStage>>>;

/// What pipelines run on in one life of a node.
#[derive(Clone)]
pub struct SimPipes {
    world: World,
    number: u16,
    node: NodeId,
    env: Env,
    compute: Arc<SimCompute>,
    links: SimLinks,
    broken: Option<Broken>,
    loaded: Loaded,
}

impl fmt::Debug for SimPipes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimPipes").field("node", &self.node).field("loaded", &self.loaded).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimPipes {
    /// For one life of a node.
    pub fn new(
        world: &World,
        number: u16,
        node: NodeId,
        env: Env,
        compute: Arc<SimCompute>,
        links: SimLinks,
        broken: Option<Broken>,
    ) -> Self {
        Self { world: world.clone(), number, node, env, compute, links, broken, loaded: Arc::default() }
    }

    /// The stages that are in memory.
    pub fn loaded(&self) -> BTreeMap<StageKey, LoadedStage> {
        lock(&self.loaded).clone()
    }

    async fn run(self, mut job: StageJob, first: Seat, control: Arc<Control>) {
        // The events outlive the stage: when `Ended` is reported, its memory is free.
        let events = Events(Mutex::new(std::mem::replace(&mut job.events, Box::new(|_| {}))));
        let result = {
            let work = Box::pin(self.drive(job, first, &control, &events));
            match select(work, Box::pin(control.stopped())).await {
                Either::Left((result, _)) => result,
                Either::Right(_) => Ok(()),
            }
        };
        events.tell(StageEvent::Ended(result.err()));
    }

    async fn drive(&self, job: StageJob, first: Seat, control: &Control, events: &Events) -> Result<(), String> {
        let begun = self.env.clock.now();
        let model = self.compute.model_card(&job.path).map_err(|error| error.to_string())?;
        job.paid.covers(&model, &job.spec.layers, job.options.rows_max)?;
        let stage = self.compute.load(&job.path, &job.spec, &job.options).map_err(|error| error.to_string())?;
        job.paid.holds(stage.weight_bytes())?;
        let bytes = stage.weight_bytes() + job.options.kv_bytes;
        let loaded = LoadedStage { layers: job.spec.layers.clone(), bytes };
        let mut in_memory = InMemory::new(&self.loaded, first.key, loaded);
        let time = std::time::Duration::from_secs_f64(stage.weight_bytes() as f64 / DISK_BYTES_PER_SECOND);
        self.world.sleep(self.number, time).await;
        let (pages, _) = stage.pages();
        events.tell(StageEvent::Loaded {
            hidden: stage.hidden(),
            vocabulary: stage.vocabulary(),
            pages,
            page_tokens: stage.page_tokens(),
            weight_bytes: stage.weight_bytes(),
            took: self.env.clock.now().since(begun),
        });
        let mut machine = StageMachine::new(stage, job.options.rows_max, job.sequences_max);
        let mut seat = first;
        loop {
            let key = seat.key;
            in_memory.is(key);
            let moved = {
                let work = Box::pin(self.serve(&mut machine, (&job.path, &job.spec.layers), &seat, control, events));
                match select(work, Box::pin(control.moved())).await {
                    Either::Left((reason, _)) => Err(reason),
                    Either::Right((next, _)) => Ok(next),
                }
            };
            // Its neighbours are to notice, too.
            drop(seat);
            let next = match moved {
                Ok(next) => next,
                Err(reason) => {
                    events.tell(StageEvent::Broken(key, reason));
                    control.moved().await
                }
            };
            machine.reset();
            seat = next;
        }
    }

    /// Takes its place in a pipeline and does its steps there until that breaks.
    async fn serve(
        &self,
        machine: &mut StageMachine,
        (path, layers): (&Path, &Range<u32>),
        seat: &Seat,
        control: &Control,
        events: &Events,
    ) -> String {
        let steps = async {
            let to = control.told(seat.key).await;
            let down = self.links.dial(self.number, self.node, to.to, &to.ticket).await?;
            events.tell(StageEvent::Linked(seat.key));
            seat.upstream.accept(self.number).await.map_err(|error| format!("the stage before: {error}"))?;
            let mut out = Vec::new();
            loop {
                let step = seat.upstream.recv().await.map_err(|error| format!("the stage before is gone: {error}"))?;
                let rows = step.get(8..12).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
                machine.step(&step, &mut out).map_err(|fault| fault.to_string())?;
                let time = self.compute.step_time(path, layers.clone(), rows as usize);
                self.world.sleep(self.number, time).await;
                down.send(std::mem::take(&mut out)).map_err(|error| format!("the stage after is gone: {error}"))?;
            }
        };
        let result: Result<std::convert::Infallible, String> = steps.await;
        match result {
            Err(reason) => reason,
            Ok(never) => match never {},
        }
    }

    fn seat(&self, place: Place) -> (Door, Seat) {
        let ticket = Ticket::random(&*self.env.rng);
        let upstream = self.links.expect(place.from, self.node, &ticket);
        (Door { endpoints: Vec::new(), ticket }, Seat { key: place.key, upstream })
    }

    async fn connect(self, last: Receiver, plan: PortPlan) -> Result<(PortSender, Port), String> {
        let first = self.links.dial(self.number, self.node, plan.first, &plan.first_ticket).await?;
        last.accept(self.number).await.map_err(|error| format!("the last stage: {error}"))?;
        let (close_first, close_last) = (first.closer(), last.closer());
        let closer = PortCloser::new(move || {
            close_first();
            close_last();
        });
        let sender = PortSender::new(move |step| first.send(step).map_err(|_| PortError::Closed));
        let start = move |sequences_max: usize, events: PortEvents| -> std::io::Result<()> {
            let spawner = Arc::clone(&self.env.spawner);
            spawner.task("tokens", Box::pin(self.answers(last, sequences_max, events)));
            Ok(())
        };
        Ok((sender, Port::new(closer, Box::new(start))))
    }

    async fn answers(self, last: Receiver, sequences_max: usize, events: PortEvents) {
        let mut count = 0_u32;
        let reason = loop {
            let message = match last.recv().await {
                Ok(message) => message,
                Err(error) => break format!("the link from the last stage is gone: {error}"),
            };
            count += 1;
            if self.broken == Some(Broken::AnswersSwallowed) && count.is_multiple_of(50) {
                continue;
            }
            match Tokens::decode(&message, sequences_max) {
                Ok(answer) => (events.tokens)(answer),
                Err(error) => break format!("the last stage sent a malformed answer: {error}"),
            }
        };
        (events.broken)(reason);
    }
}

impl Pipes for SimPipes {
    fn stage(&self, job: StageJob) -> Result<RunningStage, String> {
        let (door, first) = self.seat(job.place);
        let control = Arc::new(Control::default());
        let (told, stop, mover, pipes) = (Arc::clone(&control), Arc::clone(&control), Arc::clone(&control), self.clone());
        self.env.spawner.task("stage", Box::pin(self.clone().run(job, first, control)));
        let link = Box::new(move |link| told.tell(link));
        let move_to = Box::new(move |place| {
            let (door, seat) = pipes.seat(place);
            mover.move_to(seat);
            Ok(door)
        });
        Ok(RunningStage { door, link, move_to, stop: Box::new(move || stop.stop.notify_one()) })
    }

    fn port(&self, last: NodeId, _token_bytes: u32) -> Result<OpenPort, String> {
        let ticket = Ticket::random(&*self.env.rng);
        let expected = self.links.expect(last, self.node, &ticket);
        let pipes = self.clone();
        let connect = move |plan| -> BoxFuture<'static, Result<(PortSender, Port), String>> { Box::pin(pipes.connect(expected, plan)) };
        Ok(OpenPort { endpoints: Vec::new(), ticket, connect: Box::new(connect) })
    }
}

/// Whom a stage reports to, from wherever its task runs.
struct Events(Mutex<Box<dyn Fn(StageEvent) + Send>>);

impl Events {
    fn tell(&self, event: StageEvent) {
        (lock(&self.0))(event);
    }
}

/// A stage's place in a pipeline.
struct Seat {
    key: StageKey,
    upstream: Receiver,
}

/// What a stage is told from outside.
#[derive(Default)]
struct Control {
    link: Mutex<Option<Box<LinkStage>>>,
    linked: Notify,
    next: Mutex<Option<Seat>>,
    moved: Notify,
    stop: Notify,
}

impl Control {
    fn tell(&self, link: Box<LinkStage>) -> bool {
        *lock(&self.link) = Some(link);
        self.linked.notify_one();
        true
    }

    async fn told(&self, key: StageKey) -> Box<LinkStage> {
        loop {
            if let Some(link) = lock(&self.link).take_if(|link| link.key == key) {
                return link;
            }
            self.linked.notified().await;
        }
    }

    fn move_to(&self, seat: Seat) {
        *lock(&self.next) = Some(seat);
        self.moved.notify_one();
    }

    async fn moved(&self) -> Seat {
        loop {
            if let Some(seat) = lock(&self.next).take() {
                return seat;
            }
            self.moved.notified().await;
        }
    }

    async fn stopped(&self) {
        self.stop.notified().await;
    }
}

/// Counts a stage as in memory for as long as it is there.
struct InMemory(Loaded, StageKey);

impl InMemory {
    fn new(loaded: &Loaded, key: StageKey, stage: LoadedStage) -> Self {
        lock(loaded).insert(key, stage);
        Self(Arc::clone(loaded), key)
    }

    /// It has another name by now.
    fn is(&mut self, key: StageKey) {
        let mut loaded = lock(&self.0);
        if let Some(stage) = loaded.remove(&self.1) {
            loaded.insert(key, stage);
        }
        self.1 = key;
    }
}

impl Drop for InMemory {
    fn drop(&mut self) {
        lock(&self.0).remove(&self.1);
    }
}
