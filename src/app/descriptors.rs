//! How many files may be open, and what of the configuration fits into that.
//!
//! # Why
//! Every socket is a file. A process that has none left can accept no connection, not even to say so; so what does not fit is
//! refused by number before it is refused by the kernel.

use crate::config::Config;

/// Files of a telephone call: RTP, RTCP, and the connection to its agent.
const OF_A_CALL: u64 = 3;

/// The limit of this process; `None` where the system does not tell.
pub fn limit() -> Option<u64> {
    read(&std::fs::read_to_string("/proc/self/limits").ok()?)
}

/// The soft limit in the text of `/proc/PID/limits` (proc(5)).
fn read(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Lowers what of `config` does not fit into `files`; says what it lowered.
pub fn fit(config: &mut Config, files: u64) -> Vec<String> {
    let mut lowered = Vec::new();
    // The rest is the model, the database, listeners, trunks, and requests that the gateway makes.
    let (http, calls) = (files / 4, files / 2 / OF_A_CALL);
    let mut fit = |key: &str, value: &mut usize, most: u64| {
        let most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
        if *value > most {
            lowered.push(format!(
                "{key} = {value} does not fit into {files} open files and is {most} now; raise the limit (LimitNOFILE, ulimit -n)"
            ));
            *value = most;
        }
    };
    fit("[http] max_connections", &mut config.http.max_connections, http);
    fit("[sip] max_calls", &mut config.sip.max_calls, calls);
    lowered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_stays_and_what_does_not_is_lowered_and_told() {
        let mut config = Config::default();
        assert_eq!(fit(&mut config, 524_288), [""; 0]);
        assert_eq!((config.http.max_connections, config.sip.max_calls), (8_192, 1_000));
        let told = fit(&mut config, 1_024);
        assert_eq!((config.http.max_connections, config.sip.max_calls), (256, 170));
        assert!(told.len() == 2 && told[0].contains("max_connections") && told[1].contains("max_calls"), "{told:?}");
        let limits = "Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 524288               files
";
        assert_eq!((read(limits), read("Max open files unlimited")), (Some(1_024), None));
    }
}
