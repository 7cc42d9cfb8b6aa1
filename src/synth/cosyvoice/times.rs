//! When the flow's solver evaluates its network, on the CPU and the GPU alike.

use super::config::FlowConfig;

/// The times of the solver between 0, noise, and 1, the mel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// `1 - cos(pi/2 * k/steps)`: short steps first.
    Cosine,
    /// `k/steps`.
    Linear,
}

impl FlowConfig {
    /// The solver's times, `steps + 1` of them, in single precision as the reference computes them.
    pub fn times(&self) -> Vec<f32> {
        let at = |k: usize| k as f32 / self.steps as f32;
        let spaced = |t: f32| match self.schedule {
            Schedule::Cosine => 1.0 - (t * 0.5 * std::f32::consts::PI).cos(),
            Schedule::Linear => t,
        };
        (0..=self.steps).map(|k| spaced(at(k))).collect()
    }

    /// When the network is evaluated and the length of the step from there, by step. Times are accumulated, as the
    /// reference does.
    pub fn evaluations(&self) -> Vec<(f32, f32)> {
        let times = self.times();
        let (mut t, mut dt) = (times[0], times[1] - times[0]);
        let mut visited = Vec::with_capacity(self.steps);
        for k in 1..times.len() {
            visited.push((t, times[k] - t));
            t += dt;
            dt = times.get(k + 1).map_or(dt, |next| next - t);
        }
        visited
    }
}
