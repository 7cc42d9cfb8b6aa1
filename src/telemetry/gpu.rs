//! GPUs as their driver sees them (NVML): how busy, how fast, how warm, and what went wrong.
//!
//! The library is part of NVIDIA's driver and is opened at run time. Where it is not there, these metrics are not there
//! either, and one line of the log says so.
//!
//! # Why
//! The gateway knows what it has given a GPU to do, and not why that takes longer than before: another program, a clock that
//! was lowered for heat, memory that corrects errors. A thread of its own asks, as some answers take milliseconds and waiting
//! for errors blocks.

use std::sync::Once;
use std::time::Duration;

use metrics::{counter, gauge};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet};

/// Between two looks, which is also how long is waited for errors.
const LOOK: Duration = Duration::from_secs(5);
/// Hertz of a megahertz.
const MEGA: f64 = 1e6;

/// What a GPU answered; `None`: it does not say that, as small ones have no corrected memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Reading {
    /// Share of the time in which a kernel ran, 0 to 1.
    utilisation: Option<f64>,
    /// Of its processors, hertz.
    clock: Option<f64>,
    /// Of its memory, hertz.
    memory_clock: Option<f64>,
    /// Degrees Celsius.
    temperature: Option<f64>,
    /// Watts.
    power: Option<f64>,
    /// Errors of memory since the driver was loaded, corrected and not.
    corrected: Option<u64>,
    uncorrected: Option<u64>,
}

impl Reading {
    fn of(device: &Device<'_>) -> Self {
        let hertz = |clock| device.clock_info(clock).ok().map(|megahertz| f64::from(megahertz) * MEGA);
        let errors = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).ok();
        Self {
            utilisation: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
            clock: hertz(Clock::SM),
            memory_clock: hertz(Clock::Memory),
            temperature: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            power: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1_000.0),
            corrected: errors(MemoryError::Corrected),
            uncorrected: errors(MemoryError::Uncorrected),
        }
    }

    /// Shows what there is of it.
    fn show(&self, gpu: u32) {
        let gpu = gpu.to_string();
        if let Some(share) = self.utilisation {
            gauge!("antiphon_gpu_utilization_ratio", "gpu" => gpu.clone()).set(share);
        }
        for (part, hertz) in [("processor", self.clock), ("memory", self.memory_clock)] {
            if let Some(hertz) = hertz {
                gauge!("antiphon_gpu_clock_hertz", "gpu" => gpu.clone(), "part" => part).set(hertz);
            }
        }
        if let Some(degrees) = self.temperature {
            gauge!("antiphon_gpu_temperature_celsius", "gpu" => gpu.clone()).set(degrees);
        }
        if let Some(watts) = self.power {
            gauge!("antiphon_gpu_power_watts", "gpu" => gpu.clone()).set(watts);
        }
        for (kind, errors) in [("memory_corrected", self.corrected), ("memory_uncorrected", self.uncorrected)] {
            if let Some(errors) = errors {
                counter!("antiphon_gpu_errors_total", "gpu" => gpu.clone(), "kind" => kind).absolute(errors);
            }
        }
    }
}

/// Watches the GPUs of this machine until the process ends, if there is a driver; once, however often it is called.
pub fn watch() {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        // Loading the library may take a moment.
        let begun = std::thread::Builder::new().name("gpus".into()).spawn(|| match Nvml::init() {
            Ok(nvml) => run(&nvml),
            Err(error) => tracing::info!(reason = absent(&error), "no metrics of GPUs"),
        });
        if let Err(error) = begun {
            tracing::warn!(%error, "no thread for the metrics of GPUs");
        }
    });
}

/// Why there is no library, for people.
fn absent(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => "no NVIDIA driver (libnvidia-ml.so.1)".to_owned(),
        error => error.to_string(),
    }
}

fn run(nvml: &Nvml) {
    let count = nvml.device_count().unwrap_or_default();
    let devices: Vec<_> = (0..count).filter_map(|n| Some((n, nvml.device_by_index(n).ok()?))).collect();
    for (gpu, device) in &devices {
        // So that the metric is there before the first error.
        counter!("antiphon_gpu_errors_total", "gpu" => gpu.to_string(), "kind" => "xid").increment(0);
        tracing::info!(gpu, name = device.name().unwrap_or_default(), "a GPU is watched");
    }
    let mut events = events(nvml, &devices);
    loop {
        for (gpu, device) in &devices {
            Reading::of(device).show(*gpu);
        }
        match &events {
            Some(set) => match set.wait(LOOK.as_millis() as u32) {
                Ok(event) => failed(event.device.index().ok(), &event.event_data),
                Err(NvmlError::Timeout) => {}
                // A device that is gone: the others are still read.
                Err(error) => {
                    tracing::warn!(%error, "errors of GPUs are not told any more");
                    events = None;
                }
            },
            None => std::thread::park_timeout(LOOK),
        }
    }
}

/// What tells of errors, where devices support that.
fn events<'a>(nvml: &'a Nvml, devices: &[(u32, Device<'a>)]) -> Option<EventSet<'a>> {
    let mut set = nvml.create_event_set().ok()?;
    for (gpu, device) in devices {
        match device.register_events(EventTypes::CRITICAL_XID_ERROR, set) {
            Ok(with) => set = with,
            Err(error) => {
                tracing::info!(gpu, error = %error.error, "errors of GPUs are not told");
                return None;
            }
        }
    }
    Some(set)
}

/// A GPU tells of an error by its number (Xid; NVIDIA's "Xid errors" lists them).
fn failed(gpu: Option<u32>, xid: &Option<XidError>) {
    let gpu = gpu.map_or_else(|| "unknown".to_owned(), |gpu| gpu.to_string());
    tracing::error!(gpu, ?xid, "a GPU tells of an error");
    counter!("antiphon_gpu_errors_total", "gpu" => gpu, "kind" => "xid").increment(1);
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;

    fn shown(reading: &Reading) -> String {
        let recorder = PrometheusBuilder::new().build_recorder();
        metrics::with_local_recorder(&recorder, || reading.show(1));
        recorder.handle().render()
    }

    #[test]
    fn without_a_driver_there_is_a_reason_and_no_metric() {
        let library = std::ffi::OsStr::new("/no/such/libnvidia-ml.so");
        let error = Nvml::builder().lib_path(library).init().expect_err("no such library");
        assert!(absent(&error).contains("no NVIDIA driver"), "{error}");
        assert_eq!(shown(&Reading::default()), "", "what a GPU does not say is not shown");
    }

    #[test]
    fn what_a_gpu_says_is_shown_in_base_units() {
        let reading = Reading {
            utilisation: Some(0.5),
            clock: Some(1_980.0 * MEGA),
            temperature: Some(41.0),
            power: Some(350.0),
            corrected: Some(3),
            ..Reading::default()
        };
        let shown = shown(&reading);
        for line in [
            "antiphon_gpu_utilization_ratio{gpu=\"1\"} 0.5",
            "antiphon_gpu_clock_hertz{gpu=\"1\",part=\"processor\"} 1980000000",
            "antiphon_gpu_temperature_celsius{gpu=\"1\"} 41",
            "antiphon_gpu_power_watts{gpu=\"1\"} 350",
            "antiphon_gpu_errors_total{gpu=\"1\",kind=\"memory_corrected\"} 3",
        ] {
            assert!(shown.contains(line), "{line}: {shown}");
        }
        assert!(!shown.contains("part=\"memory\""), "{shown}");
    }
}
