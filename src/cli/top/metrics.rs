//! Reads what `/metrics` prints (Prometheus text format 0.0.4), as far as a screen needs it.

/// Samples of one scrape, in the order of the text.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Metrics(Vec<Sample>);

#[derive(Clone, Debug, PartialEq)]
struct Sample {
    name: String,
    labels: String,
    value: f64,
}

impl Metrics {
    /// Lines that are not samples are passed over.
    pub(super) fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (series, value) = line.trim().rsplit_once(' ')?;
            let (name, labels) = series.split_once('{').map_or((series, ""), |(name, rest)| (name, rest));
            Some(Sample {
                name: name.to_owned(),
                labels: labels.trim_end_matches('}').to_owned(),
                value: value.parse().ok()?,
            })
        });
        Self(samples.collect())
    }

    /// Sum over the series of `name` whose labels contain `label` (`class="live"`, or nothing for all).
    pub(super) fn sum(&self, name: &str, label: &str) -> f64 {
        self.of(name).filter(|sample| sample.labels.contains(label)).map(|sample| sample.value).sum()
    }

    /// Values of one label of `name`, each once, with their sums.
    pub(super) fn by(&self, name: &str, label: &str) -> Vec<(String, f64)> {
        let mut found: Vec<(String, f64)> = Vec::new();
        for sample in self.of(name) {
            let Some(value) = value_of(&sample.labels, label) else { continue };
            match found.iter_mut().find(|(known, _)| known == value) {
                Some((_, sum)) => *sum += sample.value,
                None => found.push((value.to_owned(), sample.value)),
            }
        }
        found
    }

    /// The quantile `q` of a histogram's observations since `before`, interpolated within its bucket as Prometheus
    /// does; nothing without observations.
    pub(super) fn quantile(&self, name: &str, q: f64, before: Option<&Self>) -> Option<f64> {
        let name = format!("{name}_bucket");
        let mut buckets: Vec<(f64, f64)> = self
            .by(&name, "le")
            .into_iter()
            .map(|(bound, count)| {
                let earlier = before.map_or(0.0, |before| before.sum(&name, &format!("le=\"{bound}\"")));
                (bound.parse().unwrap_or(f64::INFINITY), count - earlier)
            })
            .collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = buckets.last()?.1 * q;
        if rank <= 0.0 {
            return None;
        }
        let (mut low, mut below) = (0.0, 0.0);
        for (bound, count) in buckets {
            if count >= rank {
                // Above the highest bound nothing is known but that.
                return Some(if bound.is_finite() {
                    low + (bound - low) * (rank - below) / (count - below)
                } else {
                    low
                });
            }
            (low, below) = (bound, count);
        }
        None
    }

    fn of(&self, name: &str) -> impl Iterator<Item = &Sample> {
        self.0.iter().filter(move |sample| sample.name == name)
    }
}

fn value_of<'a>(labels: &'a str, label: &str) -> Option<&'a str> {
    let start = format!("{label}=\"");
    let at = labels.match_indices(&start).map(|(at, _)| at).find(|at| *at == 0 || labels[..*at].ends_with(','))?;
    labels[at + start.len()..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a_total what\n# TYPE a_total counter\na_total{class=\"live\",outcome=\"done\"} 5\n\
        a_total{class=\"batch\",outcome=\"done\"} 2\nnone\n\
        t_seconds_bucket{leg=\"sip\",le=\"0.1\"} 8\nt_seconds_bucket{leg=\"sip\",le=\"0.2\"} 10\n\
        t_seconds_bucket{leg=\"sip\",le=\"+Inf\"} 10\nt_seconds_count{leg=\"sip\"} 10\n";

    #[test]
    fn sums_are_by_label() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!(metrics.sum("a_total", ""), 7.0);
        assert_eq!(metrics.sum("a_total", "class=\"live\""), 5.0);
        assert_eq!(metrics.by("a_total", "class"), [("live".to_owned(), 5.0), ("batch".to_owned(), 2.0)]);
        assert_eq!(metrics.by("a_total", "lass"), []);
    }

    #[test]
    fn a_quantile_lies_within_its_bucket_and_is_of_what_came_since() {
        let metrics = Metrics::parse(TEXT);
        assert_eq!(metrics.quantile("t_seconds", 0.4, None), Some(0.05));
        assert_eq!(metrics.quantile("t_seconds", 0.9, None).map(|v| (v * 1e3).round()), Some(150.0));
        assert_eq!(metrics.quantile("t_seconds", 0.9, Some(&metrics)), None);
        assert_eq!(metrics.quantile("other", 0.9, None), None);
    }
}
