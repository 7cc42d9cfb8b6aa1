//! `antiphon check`: is this configuration usable, can its trunks be reached, and how would a call go?

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::Failure;
use crate::config::{self, Config};
use crate::sip::{self, DialRequest, SipConfig};

/// How long trunks may take to answer, two attempts each.
const LIMIT: Duration = Duration::from_secs(15);

#[derive(clap::Args)]
pub(super) struct Args {
    /// Configuration file; none: built-in defaults and the environment.
    #[arg(value_name = "FILE", conflicts_with_all = ["config", "schema"])]
    file: Option<PathBuf>,
    /// The same, as `serve` takes it.
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the JSON schema of the configuration, for editors and generators, and check nothing.
    #[arg(long, conflicts_with = "config")]
    schema: bool,
    /// Ask the hosts of every trunk whether they live (OPTIONS), and look their names up.
    #[arg(long)]
    sip: bool,
    /// Explain how a call would be placed, without placing it: trunk, addresses, headers, codecs.
    #[arg(long, num_args = 2, value_names = ["FROM", "TO"])]
    call: Option<Vec<String>>,
    /// The trunk of that call; none: the one whose prefixes fit.
    #[arg(long, value_name = "NAME", requires = "call")]
    trunk: Option<String>,
}

/// Loads and validates; starts nothing but what it is asked for.
pub(super) fn run(args: &Args) -> Result<(), Failure> {
    if args.schema {
        print!("{}", config::SCHEMA);
        return Ok(());
    }
    let file = args.file.as_ref().or(args.config.as_ref());
    let config: Config = super::load(file.map(PathBuf::as_path))?;
    config.check_exposure()?;
    match file {
        Some(file) => println!("{}: valid", file.display()),
        None => println!("defaults and environment: valid"),
    }
    if let Some([from, to]) = args.call.as_deref() {
        explain(&config.sip, from, to, args.trunk.clone())?;
    }
    if args.sip {
        super::block_on(reach(&config.sip))?;
    }
    Ok(())
}

fn explain(config: &SipConfig, from: &str, to: &str, trunk: Option<String>) -> Result<(), Failure> {
    let from = Some(from.to_owned()).filter(|from| !from.is_empty());
    let request = DialRequest { to: to.to_owned(), from, trunk, headers: BTreeMap::new(), timeout: None };
    let call = match sip::explain(config, &request) {
        Ok(call) => call,
        Err(error) => return Err(Failure::failed(format!("a call to `{to}` would not be placed: {error}"))),
    };
    match &call.trunk {
        Some(trunk) => println!("trunk      {trunk}"),
        None => println!("trunk      none: straight to a loopback address"),
    }
    for (n, target) in call.targets.iter().enumerate() {
        println!("{} {target}", if n == 0 { "INVITE    " } else { "then      " });
        if call.transport_asked {
            let ways = super::block_on(async { Ok(sip::ways(config, &call, target, None).await) })?;
            if ways.is_empty() {
                println!("           by no way: the host has no address that can be found");
            }
            for (transport, address) in ways {
                println!("           by {transport} at {address}");
            }
        }
    }
    match &call.from {
        Some(from) => println!("From       <{from}>"),
        None => println!("From       a user of ours at the listener's address"),
    }
    for header in &call.headers {
        println!("           {header}");
    }
    let keys = call.srtp.map(|keys| format!(", encrypted only ({keys})")).unwrap_or_default();
    println!("codecs     {}{}", call.codecs.join(", "), keys);
    if let Some((calls, per_minute, minutes)) = call.limits {
        let limit = |n: usize| if n == 0 { "any number of".to_owned() } else { n.to_string() };
        let minutes = usize::try_from(minutes).unwrap_or(usize::MAX);
        println!(
            "limits     {} calls at a time, {} a minute, {} minutes a day",
            limit(calls),
            limit(per_minute),
            limit(minutes)
        );
    }
    Ok(())
}

/// Prints a line for each host of each trunk.
async fn reach(config: &SipConfig) -> Result<(), Failure> {
    if config.trunk.is_empty() {
        println!("there is no [[sip.trunk]] to reach");
        return Ok(());
    }
    let trunks = sip::probe(config, LIMIT).await.map_err(Failure::unavailable)?;
    let mut silent = 0;
    for trunk in &trunks {
        for target in &trunk.targets {
            let found = sip::addresses(&target.host).await;
            let found: Vec<String> = found.iter().map(ToString::to_string).collect();
            let at = if found.is_empty() { "no address".to_owned() } else { found.join(", ") };
            let state = match (target.up, &target.error) {
                (Some(true), _) => "answers OPTIONS".to_owned(),
                (_, Some(error)) => format!("does not answer: {error}"),
                (_, None) => "does not answer".to_owned(),
            };
            silent += usize::from(target.up != Some(true));
            println!("{}: {} ({at}) {state}", trunk.name, target.host);
        }
    }
    match silent {
        0 => Ok(()),
        // Some carriers answer no OPTIONS; that is for people to judge.
        some => Err(Failure::unavailable(format!("{some} of the trunks' hosts do not answer"))),
    }
}
