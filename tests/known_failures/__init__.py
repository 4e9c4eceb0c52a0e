"""Twenty ways in which public RL code got Mixture-of-Experts training wrong, and the test that keeps each out of here.

The tests' docstrings name the public issues. A file is named where the test is not in this folder.

 1 GSPO aggregated over tokens                test_gspo_weighs_sequences_alike_whatever_their_lengths
 2 GRPO's clip range under GSPO               test_each_level_of_ratio_has_a_range_that_clips_it
 3 a sequence's ratio summed over tokens      test_a_response_twice_as_long_weighs_the_same
 4 clip fractions that nobody can read        test_clip_fractions_stand_beside_the_mini_batch_they_belong_to
 5 one update per rollout: no ratio but 1     test_with_one_update_per_step_all_arms_coincide (test_trainer.py)
 6 dense layers shift the routes              test_dense_layers_in_an_engines_rows_shift_no_route
 7 a registry of discarded routers            test_a_discarded_decoder_is_neither_heard_nor_kept_alive
 8 rows mixed up between (micro-)batches      test_every_row_replays_its_own_routes_and_none_when_off
 9 multi-token prediction aliases a layer     test_a_multi_token_prediction_router_takes_no_decoder_layers_routes
10 routes in a first-in-first-out queue,      test_checkpointing_recomputes_each_micro_batch_under_its_own_routes
   two forwards recorded as one,              test_mismatched_forwards_do_not_join
   gates gathered from what top-k left
     test_forced_ids_reach_the_experts_with_the_familys_own_weights_and_gradient (routing/test_families.py)
11 a recomputation that routes differently    test_the_backward_recomputation_uses_the_forwards_routes
12 routes left by a forward-only pass         test_forwards_without_backward_leave_nothing_for_the_next_update
13 padding that is replayed or counted        test_padding_is_forced_nowhere_and_counted_nowhere
14 dummy routes in the next turn              test_the_next_turn_keeps_the_prefix_and_routes_its_last_token_anew
15 the last prompt token loses its route      test_the_last_prompt_token_keeps_its_route_however_little_is_sampled
16 stale rows of a longer request             test_rows_beyond_the_sequence_are_refused
17 routes of newer weights than log-probs,    test_routes_of_two_weight_versions_do_not_become_one_trace
   a server that still has old weights
       test_a_lost_push_is_noticed_by_the_count_or_else_by_completions (integrations/test_push.py)
18 a capture of zeros                         test_a_capture_of_zeros_is_refused_layer_by_layer
19 ids beyond 255 in a byte                   test_experts_beyond_255_survive_recording_saving_and_replay
20 replay without routes,                     test_replay_without_routes_is_an_error_and_of_some_reports_its_share
   replay taken for a cure of all mismatch    test_replaying_the_rollouts_routes_removes_what_the_router_noise_adds
                                              (rollouts/test_mismatch.py)

What cannot occur here is tested by its effect alone: there is no queue and no registry of routes (7, 10, 12), no packed
layout (8: rows are padded), no completion that goes on under other weights (17), and no task of several turns (14).
With one expert per token a capture of zeros cannot be told from a router that always takes expert 0 (18).
"""
