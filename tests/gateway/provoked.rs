//! Metrics that no ordinary call moves, and who moves them.

use std::path::Path;

use antiphon::telemetry::metrics::METRICS;

/// Metrics that stay zero or absent on the tour of [`super::tour`], by the test that provokes them and asserts what they tell: its file, its
/// name, and the metrics, each of which that file names.
pub(crate) const PROVOKED: &[(&str, &str, &[&str])] = &[
    ("tests/gateway/loadgen.rs", "a_ladder_tells_what_few_places_bear", &["antiphon_refusals_total"]),
    (
        "tests/gateway/fallback.rs",
        "where_no_device_speaks_a_call_is_refused_or_has_the_default_voice",
        &["antiphon_fallback_total", "antiphon_stand_in_total", "antiphon_device_failures_total"],
    ),
    (
        "tests/gateway/phrases.rs",
        "a_greeting_is_spoken_before_the_first_call_and_heard_on_it",
        &["antiphon_phrase_bytes"],
    ),
    (
        "src/synth/device/tests/shown.rs",
        "what_waits_what_gave_way_and_what_holds_memory_is_shown",
        &["voice_gpu_memory_bytes", "antiphon_scheduler_queue_depth", "antiphon_preemptions_total"],
    ),
    (
        "src/telemetry/gpu.rs",
        "what_a_gpu_says_is_shown_in_base_units",
        &[
            "antiphon_gpu_utilization_ratio",
            "antiphon_gpu_clock_hertz",
            "antiphon_gpu_temperature_celsius",
            "antiphon_gpu_power_watts",
            "antiphon_gpu_errors_total",
        ],
    ),
    (
        "tests/sip/telephones.rs",
        "a_registration_whose_connection_is_gone_is_made_anew",
        &["antiphon_trunk_flows_lost_total"],
    ),
    (
        "tests/gateway/workers.rs",
        "a_gateway_speaks_through_a_worker_of_another_process",
        &["antiphon_worker_up", "antiphon_worker_handovers_total"],
    ),
    (
        "src/synth/device/remote/tests/voices.rs",
        "a_voice_that_only_the_gateway_has_is_sent_once_and_sounds_as_in_process",
        &["antiphon_voices_copied_total"],
    ),
    (
        "tests/gateway/handover.rs",
        "a_second_process_takes_the_place_of_the_first_and_no_call_is_lost",
        &["antiphon_handover_calls"],
    ),
    (
        "src/handover/place.rs",
        "datagrams_go_to_the_process_before_until_it_is_gone",
        &["antiphon_handover_datagrams_total"],
    ),
    (
        "tests/gateway/nodes.rs",
        "whichever_gateway_a_request_comes_to_the_owner_answers_it",
        &["antiphon_cluster_nodes", "antiphon_passed_on_total"],
    ),
    (
        "tests/gateway/nodes.rs",
        "a_gateway_goes_on_without_redis_and_notices_one_that_was_killed",
        &["antiphon_registry_up"],
    ),
    (
        "tests/gateway/database.rs",
        "jobs_and_records_outlive_their_gateway_and_calls_the_database",
        &["antiphon_database_up"],
    ),
    (
        "tests/batch/records.rs",
        "while_the_database_is_away_records_wait_on_disk_and_follow_after_a_restart",
        &["antiphon_records_spooled_bytes"],
    ),
    (
        "tests/sim/turns.rs",
        "a_slow_writer_causes_no_underrun_but_a_slow_engine_does",
        &["antiphon_text_starved_seconds", "antiphon_underruns_total", "antiphon_underrun_seconds"],
    ),
    (
        "tests/gateway/bridges.rs",
        "a_caller_speaks_with_a_human_the_agent_whispers_and_comes_back",
        &["antiphon_bridges", "antiphon_bridges_total"],
    ),
    (
        "src/call/bridge.rs",
        "a_call_that_takes_nothing_loses_pieces_and_does_not_hold_up_the_other",
        &["antiphon_bridge_dropped_total"],
    ),
    (
        "src/call/info.rs",
        "a_reader_of_a_calls_sound_that_falls_behind_misses_the_oldest_and_is_told_how_much",
        &["antiphon_tap_dropped_total"],
    ),
    (
        "src/call/meters.rs",
        "a_call_counts_what_leaves_late_and_what_its_listener_misses",
        &["antiphon_pacing_stalls_total"],
    ),
    (
        "tests/gateway/hostile.rs",
        "bad_input_never_costs_another_call_a_frame",
        &["antiphon_rtp_discarded_total", "antiphon_webrtc_datagrams_dropped_total"],
    ),
    ("tests/sip/media.rs", "what_a_telephone_reports_lost_is_told_and_shown", &["antiphon_rtcp_fraction_lost"]),
    ("tests/sip/early.rs", "a_caller_is_answered_while_it_rings", &["antiphon_sip_transactions"]),
    (
        "tests/sip/flood.rs",
        "guesses_that_answer_no_challenge_keep_nothing_and_shut_no_caller_out",
        &["antiphon_sip_auth_total"],
    ),
    (
        "tests/sip/trunks.rs",
        "health_is_asked_by_options_and_shown",
        &["antiphon_trunk_up", "antiphon_trunk_checks_total"],
    ),
    ("tests/sip/trunks.rs", "a_host_that_fails_is_passed_over_and_left_alone", &["antiphon_trunk_failovers_total"]),
    (
        "tests/gateway/hears.rs",
        "the_demo_agent_repeats_what_it_heard",
        &["antiphon_turn_seconds", "antiphon_recognizer_seconds"],
    ),
    (
        "tests/gateway/hears.rs",
        "a_recogniser_that_is_not_there_costs_an_apology_and_the_call_goes_on",
        &["antiphon_recognizer_errors_total", "antiphon_deaf_seconds"],
    ),
    (
        "src/hear/stream/tests.rs",
        "what_a_service_streams_is_a_turn",
        &["antiphon_recognizer_audio_seconds_total", "antiphon_recognizer_cost_micros_total"],
    ),
    ("src/hear/pool.rs", "words_that_are_not_believed_are_counted_by_why", &["antiphon_recognizer_suppressed_total"]),
    (
        "tests/webrtc/calls.rs",
        "a_candidate_that_cannot_be_sent_to_is_counted_and_costs_the_call_nothing",
        &["antiphon_webrtc_packets_lost_total", "antiphon_webrtc_sends_failed_total"],
    ),
    (
        "tests/webrtc/calls.rs",
        "a_call_without_udp_goes_over_tcp_and_strangers_are_turned_away",
        &["antiphon_webrtc_tcp_refused_total"],
    ),
    ("tests/webrtc/moving.rs", "a_peer_behind_a_nat_that_forgets_stays_in_its_call", &["antiphon_webrtc_moves_total"]),
    ("src/media/webrtc.rs", "a_frame_that_a_copy_brings_back_is_counted", &["antiphon_webrtc_recovered_total"]),
    (
        "src/records/tests.rs",
        "a_database_that_refuses_is_tried_again_and_calls_do_not_wait",
        &["antiphon_records_dropped_total"],
    ),
    (
        "tests/gateway/supervised.rs",
        "a_part_that_panics_is_started_again_and_nothing_of_a_recorded_call_is_missing",
        &["antiphon_part_panics_total"],
    ),
    (
        "tests/gateway/full_disk.rs",
        "calls_go_on_beside_a_full_disk_and_with_room_again_nothing_is_missing",
        &["antiphon_recording_errors_total"],
    ),
    (
        "src/recording/tests.rs",
        "a_disk_that_does_not_keep_up_costs_sound_and_no_order",
        &["antiphon_recording_dropped_seconds_total", "antiphon_recording_dropped_seconds"],
    ),
    (
        "tests/gateway/ringing.rs",
        "a_call_leaves_a_record_that_is_listed_exported_and_delivered",
        &["antiphon_webhooks_total", "antiphon_webhook_events_total"],
    ),
    (
        "src/telemetry/otlp/traces.rs",
        "events_become_records_and_a_full_queue_drops_them",
        &["antiphon_traces_dropped_total"],
    ),
    (
        "src/telemetry/otlp/logs.rs",
        "lines_that_find_the_queue_full_are_dropped_and_counted",
        &["antiphon_logs_dropped_total"],
    ),
    (
        "tests/gateway/llm.rs",
        "a_caller_talks_with_a_model_and_what_was_heard_is_its_history",
        &[
            "antiphon_llm_requests_total",
            "antiphon_llm_first_token_seconds",
            "antiphon_llm_tokens_total",
            "antiphon_llm_cost_micros_total",
        ],
    ),
    ("tests/gateway/llm.rs", "a_model_looks_something_up_presses_keys_and_hangs_up", &["antiphon_llm_tools_total"]),
];

/// The text of a test's file; of one beside the code, the tests only.
fn suite(file: &str) -> String {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).expect(file);
    text.split_once("#[cfg(test)]\nmod tests {").map_or(text.clone(), |(_, tests)| tests.to_owned())
}

#[test]
fn what_the_tour_does_not_move_is_asserted_where_it_is_provoked() {
    for (file, test, metrics) in PROVOKED {
        let source = suite(file);
        assert!(source.contains(&format!("fn {test}(")), "{file} has no test {test}");
        for metric in *metrics {
            assert!(METRICS.iter().any(|known| known.name == *metric), "there is no metric {metric}");
            assert!(source.contains(metric), "{file} does not name {metric}");
        }
    }
}
