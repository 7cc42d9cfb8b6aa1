//! How many files may be open, and what of the configuration fits into that.
//!
//! # Why
//! Every socket is a file. A process that has none left can accept no connection, not even to say so; so what does not fit is
//! refused by number before it is refused by the kernel.

use crate::config::Config;

/// Files of a telephone call: RTP, RTCP, and the connection to its agent.
const OF_A_CALL: u64 = 3;

/// Raises the limit of this process to the most that it may have, and gives it; `None` where the system does not tell.
///
/// The limit that most shells give, 1,024, is for programs that use `select`; this one may have as many as its hard limit.
pub fn raise() -> Option<u64> {
    let raised = rlimit::increase_nofile_limit(u64::MAX);
    raised.or_else(|_| rlimit::Resource::NOFILE.get_soft()).ok()
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
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_one() {
        let (soft, hard) = rlimit::Resource::NOFILE.get().expect("the system tells");
        rlimit::Resource::NOFILE.set(soft.min(hard - 1), hard).expect("lowering is always allowed");
        assert_eq!(raise(), Some(hard));
        assert_eq!(rlimit::Resource::NOFILE.get().expect("the system tells"), (hard, hard));
    }
}
