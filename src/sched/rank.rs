//! How urgent each open job is, and which stages are of use to it.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::config::Config;
use super::forecast::Forecast;
use super::inflight::InFlight;
use super::job::{Job, JobId, State};
use super::memory::Memory;
use super::step::{Slot, Stage, Stages};
use super::stream::Stream;
use super::table::Table;
use super::tenant::Tenants;
use crate::audio::duration_of;

/// A stream rests at its lead limit until it is down to this part of it, so that it works in bursts.
const RESUME: f64 = 0.75;
/// A cancelled job that is open while nothing runs is noticed after this at the latest.
const WATCH: Duration = Duration::from_millis(10);

/// What a job is to the next step, from the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// Its listener may hear a gap before the next chunk is made.
    Critical,
    /// First audio of a silent stream.
    First,
    /// Its listener has less than the slack reserve.
    Reserve,
    /// Its listener has less than the lead limit.
    Comfort,
    /// A stream without a listener's clock, beyond the lead limit.
    Surplus,
    /// Batch.
    Batch,
}

impl Rank {
    /// First audio, or a gap that is about to be heard: what else there is may lengthen its step by little.
    pub(super) fn is_urgent(self) -> bool {
        self <= Rank::First
    }

    /// Its step waits for no fuller one.
    pub(super) fn is_hurried(self) -> bool {
        self <= Rank::Reserve
    }

    /// Below the lead limit: its listener's clock runs, or waits for it to begin.
    pub(super) fn is_awaited(self) -> bool {
        self <= Rank::Comfort
    }
}

/// A job that could be in the next step.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) job: JobId,
    pub(super) slot: Slot,
    pub(super) rank: Rank,
    /// Within the rank: the earlier the sooner.
    key: Instant,
    /// Batch: the tenant's virtual time, then order of arrival.
    share: f64,
    /// Ranked higher only to free memory: it does not make a first audio wait.
    pub(super) finishing: bool,
    /// When its listener hears a gap if nothing more comes, if there is one.
    pub(super) underrun: Option<Instant>,
    /// What it would run by itself.
    pub(super) stage: Stage,
    /// What it can run.
    pub(super) stages: Stages,
    /// Bytes that it has to get back first.
    pub(super) memory_to_resume: u64,
    /// Bytes that its flow takes when it runs.
    pub(super) growth: u64,
}

impl Candidate {
    pub(super) fn is_live(&self) -> bool {
        self.rank != Rank::Batch
    }
}

/// What ranks.
#[derive(Clone, Copy)]
pub(super) struct Ranking<'a> {
    pub(super) config: &'a Config,
    pub(super) table: &'a Table,
    pub(super) tenants: &'a Tenants,
    pub(super) inflight: &'a InFlight,
    /// A listener with less left than this may hear a gap before his next chunk is made.
    pub(super) critical: Duration,
}

impl<'a> Ranking<'a> {
    /// Of `scheduler`.
    pub(super) fn of(scheduler: &'a Scheduler) -> Self {
        let Scheduler { config, table, tenants, inflight, critical, .. } = scheduler;
        Self { config, table, tenants, inflight, critical: *critical }
    }

    /// All jobs that could run now, the most urgent first.
    pub(super) fn candidates(&self, now: Instant) -> Vec<Candidate> {
        let least = self.tenants.least();
        let mut all: Vec<Candidate> =
            self.table.open_jobs().filter_map(|(id, job)| self.candidate(now, least, id, job)).collect();
        all.sort_by(|a, b| {
            a.rank
                .cmp(&b.rank)
                .then_with(|| a.key.cmp(&b.key))
                .then_with(|| a.share.total_cmp(&b.share))
                .then(a.job.cmp(&b.job))
        });
        all
    }

    fn candidate(&self, now: Instant, least: f64, id: JobId, job: &Job) -> Option<Candidate> {
        let slot = match job.state {
            State::Open(slot) | State::Parked(slot) if !job.blocked && !self.inflight.is_busy(slot) => slot,
            _ => return None,
        };
        let stream = self.table.stream(job.spec.stream)?;
        let front = stream.jobs.front() == Some(&id);
        if !front && job.is_parked() && !self.table.front_is_open(job) {
            // The front comes back first: if its successor kept what it needs, neither could ever go on.
            return None;
        }
        let stages = Stage::ALL.into_iter().filter(|stage| job.ready.has(*stage));
        let stages = stages.filter(|stage| front || !is_sound(*stage)).fold(Stages::NONE, Stages::with);
        let (memory_to_resume, growth) = (job.memory_to_resume(), job.growth());
        if !job.is_live() {
            let (stage, share) = (stages.last()?, self.tenants.time(job.tenant));
            let (rank, finishing, underrun) = (Rank::Batch, false, None);
            return Some(Candidate {
                job: id,
                slot,
                rank,
                key: now,
                share,
                finishing,
                underrun,
                stage,
                stages,
                memory_to_resume,
                growth,
            });
        }
        if stream.resting {
            return None;
        }
        let stages = self.useful(now, job, stream, front, stages);
        let stage = stages.last()?;
        let (rank, key) = self.urgency(now, id, job, stream, front);
        let (rank, key, finishing) = match (rank, stream.finishing.filter(|_| front && !stream.is_held())) {
            // After all that are at their reserve, and the nearest to its end first.
            (Rank::Comfort, Some(left)) => (Rank::Reserve, now + self.reserve() + left, true),
            _ if !stream.paced && stream.lead(now) >= self.config.max_lead() => (Rank::Surplus, key, false),
            _ => (rank, key, false),
        };
        let target = self.config.first_audio_target();
        let lag = if rank == Rank::First { self.tenants.lag(job.tenant, least, target) } else { Duration::ZERO };
        let (key, underrun) = (key + lag, stream.underrun_at());
        Some(Candidate {
            job: id,
            slot,
            rank,
            key,
            share: 0.0,
            finishing,
            underrun,
            stage,
            stages,
            memory_to_resume,
            growth,
        })
    }

    /// Of what a live job could run, what is of use: where its tokens suffice for its lead, only what makes sound.
    fn useful(&self, now: Instant, job: &Job, stream: &Stream, front: bool, stages: Stages) -> Stages {
        let ahead = job.decoded.saturating_sub(job.samples);
        // A chunk may need more tokens than the lead limit has room for: then decoding is the only way to sound.
        let finishing = stream.finishing.filter(|_| front && !stream.is_held());
        let can_wait = !front || stages.has(Stage::Flow) || stages.has(Stage::Vocode);
        let full = stream.lead(now) + duration_of(ahead) >= self.config.max_lead();
        if !(stream.paced && finishing.is_none() && can_wait && full) {
            return stages;
        }
        Stage::ALL.into_iter().filter(|stage| is_sound(*stage) && stages.has(*stage)).fold(Stages::NONE, Stages::with)
    }

    fn urgency(&self, now: Instant, id: JobId, job: &Job, stream: &Stream, front: bool) -> (Rank, Instant) {
        let Some(underrun) = stream.underrun_at() else {
            // On hold no listener waits; what is made then is only for a smooth return.
            let held = (Rank::Comfort, now + self.config.max_lead());
            return if stream.is_held() { held } else { (Rank::First, job.deadline) };
        };
        if underrun <= now {
            // A gap in mid-utterance is heard; between utterances it is a first audio again.
            let gap = front && job.samples > 0 && !job.resumes;
            return if gap { (Rank::Critical, underrun) } else { (Rank::First, underrun.max(job.deadline)) };
        }
        let decoded = if front { Duration::ZERO } else { duration_of(self.table.undelivered_before(id)) };
        let slack = stream.lead(now) + decoded;
        let rank = if slack < self.critical {
            Rank::Critical
        } else if slack < self.reserve() {
            Rank::Reserve
        } else {
            Rank::Comfort
        };
        (rank, underrun + decoded)
    }

    fn reserve(&self) -> Duration {
        self.config.slack_reserve().max(2 * self.critical).min(self.config.max_lead().mul_f64(RESUME))
    }
}

fn is_sound(stage: Stage) -> bool {
    matches!(stage, Stage::Flow | Stage::Vocode)
}

/// Lets streams that reached their lead limit rest until part of it is used up, and gives what is critical with those
/// that do not: a listener with less left than this may hear a gap before his next chunk is made.
///
/// While memory is short, a stream whose utterance can be finished within twice that limit does not rest: an utterance
/// holds its memory until its last sample is made, so few at a time and each to its end hold less than all of them
/// side by side.
pub(super) fn rest(table: &mut Table, now: Instant, config: &Config, forecast: &Forecast, memory: &Memory) -> Duration {
    let limit = config.max_lead();
    let short = memory.is_mostly_live(table);
    let mut awake = 0;
    table.each_open_live(|id, job, stream| {
        let (sounds, waits) = (job.samples > 0, job.awaits_text());
        let left = forecast.seconds_of(job.spec.chars) - duration_of(job.samples).as_secs_f64();
        let left = Duration::from_secs_f64(left.clamp(0.0, 60.0));
        let lead = stream.lead(now);
        let front = stream.jobs.front() == Some(&id);
        if front {
            stream.finishing = (short && sounds && lead + left <= 2 * limit).then_some(left);
        }
        let resting = lead >= limit || stream.resting && lead > limit.mul_f64(RESUME);
        stream.resting = stream.paced && stream.finishing.is_none() && resting;
        awake += u32::from(!stream.resting && front && !waits);
    });
    // Streams that work are in different stages: they meet in steps half as wide as their number.
    let chunk = Duration::from_secs_f64(forecast.chunk((awake / 2).max(1)).min(60.0));
    (chunk.mul_f64(1.5) + 2 * config.max_step()).min(limit / 2)
}

/// When something becomes possible that is not now.
pub(super) fn wake_at(table: &Table, now: Instant, config: &Config) -> Option<Instant> {
    if table.counts() == (0, 0) {
        return None;
    }
    let mut wake = now + if table.slots.is_idle() { super::SWEEP } else { WATCH };
    for (_, job) in table.open_jobs().filter(|(_, job)| job.is_live()) {
        let Some(stream) = table.stream(job.spec.stream).filter(|stream| stream.resting) else { continue };
        let resume = stream.underrun_at().and_then(|at| at.checked_sub(config.max_lead().mul_f64(RESUME)));
        wake = resume.map_or(wake, |resume| wake.min(resume.max(now + Duration::from_micros(100))));
    }
    Some(wake)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_in_the_order_of_urgency() {
        let ranks = [Rank::Batch, Rank::First, Rank::Surplus, Rank::Reserve, Rank::Critical, Rank::Comfort];
        let mut sorted = ranks;
        sorted.sort();
        let expected = [Rank::Critical, Rank::First, Rank::Reserve, Rank::Comfort, Rank::Surplus, Rank::Batch];
        assert_eq!(sorted, expected);
    }

    /// What urgency a listener with `lead` ahead gives his job.
    fn rank(lead: Duration, held: bool) -> Rank {
        use super::super::stream::StreamNote;
        use crate::sched::tests::spec;
        use crate::turn::{Class, StreamId};
        let now = crate::clock::now();
        let config = Config::default();
        let (mut table, mut tenants) = (Table::new(1, true), Tenants::default());
        let tenant = tenants.index(&"".into(), &config, now);
        let id = table.add(now, spec(1, Class::Live), tenant, now, || tenants.permit(tenant));
        table.open(id, Slot(0));
        let job = table.job_mut(id).expect("there");
        (job.state, job.ready) = (State::Open(Slot(0)), Stages::NONE.with(Stage::Flow));
        let stream = table.stream_mut(StreamId(1)).expect("there");
        if !lead.is_zero() {
            stream.produced(now, crate::audio::samples_in(lead));
        }
        if held {
            stream.note(now, StreamNote::Held);
        }
        let (inflight, critical) = (InFlight::default(), Duration::from_millis(100));
        let ranking = Ranking { config: &config, table: &table, tenants: &tenants, inflight: &inflight, critical };
        ranking.candidates(now)[0].rank
    }

    #[test]
    fn the_less_a_listener_has_ahead_the_more_urgent_is_his_job() {
        let ms = Duration::from_millis;
        assert_eq!(rank(ms(0), false), Rank::First);
        assert_eq!(rank(ms(99), false), Rank::Critical);
        assert_eq!(rank(ms(240), false), Rank::Reserve);
        assert_eq!(rank(ms(1_000), false), Rank::Comfort);
        assert_eq!(rank(ms(50), true), Rank::Comfort, "on hold no gap comes nearer");
    }
}
